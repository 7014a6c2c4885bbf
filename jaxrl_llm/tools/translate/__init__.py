"""Translates a config of TRL, veRL, EasyR1 or Search-R1 into a config of jaxrl_llm, key by key.

readers.py reads the keys of a config or script. The .tsv tables and the rules of trl.py, verl.py, easyr1.py and
search_r1.py make fields of jaxrl_llm of them, and writer.py writes a config file. No code of the user is run: script.py
and shell.py interpret Python and shell scripts.
"""
