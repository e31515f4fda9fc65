"""What is seen of a run from outside: utilisation, profiles, memory."""
