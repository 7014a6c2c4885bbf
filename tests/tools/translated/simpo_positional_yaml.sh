# from the README: one command for each base model
ACCELERATE_LOG_LEVEL=info accelerate launch --config_file conf/four_processes.yaml scripts/run_simpo.py simpo_own_config.yaml
