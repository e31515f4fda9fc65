"""Distributed backends."""
