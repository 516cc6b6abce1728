"""Plan of a step: stages, tasks, messages, and the actions of every rank."""
