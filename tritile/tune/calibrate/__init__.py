"""Measuring many configs at many sizes, choosing a portfolio of them, fitting what predicts its times."""
