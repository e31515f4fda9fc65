"""Operators: which implementations there are, which one a model gets on this device, and how it is put in and out."""
