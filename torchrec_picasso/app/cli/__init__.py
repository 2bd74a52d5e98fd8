"""The command line: one file per subcommand, ``arguments`` and ``checks`` of all."""
