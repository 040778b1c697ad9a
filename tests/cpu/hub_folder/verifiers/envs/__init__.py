"""Where versions with load_environment have their environments."""
