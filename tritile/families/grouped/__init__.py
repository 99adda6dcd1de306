"""Products of many groups in one launch."""
