"""What each primitive makes of the facts of its inputs."""
