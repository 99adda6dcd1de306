"""The operations: arguments checked, output allocated, kernel launched."""
