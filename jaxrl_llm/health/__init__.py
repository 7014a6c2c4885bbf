"""Health rules, which judge a run by its records, and readers for the logs of jaxrl_llm and of other trainers.

doctor/pyproject.toml packages this folder alone, as jaxrl_doctor.health. So its files use relative imports, and import
nothing else of jaxrl_llm but errors.py.
"""
