"""The place of environments in versions with load_environment."""
