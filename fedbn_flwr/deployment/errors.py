"""The error that the deployment's commands show."""


class DeploymentError(ValueError):
    """Bad input or a state that a command cannot work with; one line that names it and what is allowed."""
