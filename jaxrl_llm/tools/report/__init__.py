"""A page about one or several runs, made from the files of their workdirs: `jaxrl report WORKDIR`."""
