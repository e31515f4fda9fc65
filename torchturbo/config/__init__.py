"""Configuration: sparse layers (file, environment, command line, framework) merged into one validated whole."""
