"""Servers and models that tests of more than one area start."""
