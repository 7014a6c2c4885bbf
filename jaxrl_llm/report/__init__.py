"""A page about one or several runs, made from the files of their workdirs: `python -m jaxrl_llm.report WORKDIR`."""
