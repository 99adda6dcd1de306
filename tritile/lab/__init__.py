"""What compares and explains: it stands on everything, and nothing stands on it."""
