"""tritile's own problems as subjects of tuning: operands, right answers, and how configs run."""

from tritile.tune.subject.problem import ProblemSpace, ProblemSubject, is_tuned, task_of

__all__ = ["ProblemSpace", "ProblemSubject", "is_tuned", "task_of"]
