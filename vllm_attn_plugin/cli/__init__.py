"""The command line, a module a command; nothing heavier than typer is imported before a command runs."""
