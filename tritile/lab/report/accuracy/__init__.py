"""Errors of products by precision, on easy and on hard data."""
