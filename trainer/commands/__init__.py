"""Commands of stage two with much to say for themselves."""
