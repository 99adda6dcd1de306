"""Calibration: measure configs of a class at many sizes, choose a portfolio, fit what predicts its times."""
