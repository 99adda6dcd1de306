"""Calibration: time configs of a class at many sizes, and train what predicts their times."""
