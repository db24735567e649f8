"""This process and its operating system: files, processes, environment variables, launchers' settings."""
