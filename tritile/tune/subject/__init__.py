"""tritile's own problems as subjects of tuning: operands, right answers, and how configs run."""

from tritile.tune.subject.problem import ProblemSubject, is_tuned, task_of
from tritile.tune.subject.space import ProblemSpace

__all__ = ["ProblemSpace", "ProblemSubject", "is_tuned", "task_of"]
