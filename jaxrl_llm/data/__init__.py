"""Problems and their prompts: from files, tasks and functions of yours to token ids."""
