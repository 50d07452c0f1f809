"""The command `skein`: demo, compare, bench and methods. It needs the extra `cli`; app.py is where it starts."""
