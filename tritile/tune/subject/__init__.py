"""Problems of tritile's own operations as tunables: operands, right answers, and how configs run."""
