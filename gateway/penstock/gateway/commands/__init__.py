"""Commands and programs that need no server: what only the command line, or a program, imports."""
