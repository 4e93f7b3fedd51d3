"""Other people's methods behind granikv's kernel interface, one file per method_backend."""
