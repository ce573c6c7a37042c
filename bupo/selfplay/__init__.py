"""The league of past selves and who meets whom."""
