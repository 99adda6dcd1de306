"""tritile's own problems as subjects of tuning: operands, right answers, and how configs run."""
