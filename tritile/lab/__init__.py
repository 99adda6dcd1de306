"""What compares and explains: it stands on the rooms of calls and of tuning, and none of these on it."""
