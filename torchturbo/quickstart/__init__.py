"""The first run: a small real model learns to file support tickets, on any machine, without a model hub."""
