"""Make products of many groups in one launch."""
