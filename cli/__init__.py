"""The `openforge` command and the composition root. One file a group of commands; `main.py` is the table of them."""
