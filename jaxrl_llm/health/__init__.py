"""The rules that judge a run by its records, and the reader of logs, ours and other trainers'.

doctor/pyproject.toml packages this room alone, as jaxrl_doctor.health. So its files import each other by relative
names, and nothing else of jaxrl_llm but errors.py.
"""
