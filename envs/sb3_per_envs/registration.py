"""The environment ids of this package."""


def register_envs() -> None:
    """
    Register the ids with Gymnasium.

    Importing ``sb3_per_envs`` calls this, and so does Gymnasium before 1.0 through the
    ``gymnasium.envs`` entry point. Once registered, an id is left as it is, so that calling
    again (a second import path, a worker process) changes nothing and warns about nothing.
    """
    # Not at module level: Gymnasium < 1.0 loads the entry point in the middle of its own import,
    # and asks this module for the function when gymnasium is only partly imported.
    from gymnasium.envs.registration import register, registry

    if "sb3_per/GridWorld-v0" not in registry:
        register(
            id="sb3_per/GridWorld-v0",
            entry_point="sb3_per_envs.grid_world:GridWorldEnv",
            # The square of the default length: a random walk needs length * (length - 1) steps
            # on average, the shortest path length - 1.
            max_episode_steps=100,
        )
    if "sb3_per/BlindCliffwalk-v0" not in registry:
        # No time limit: every action ends the episode or moves on, so it has n steps at most.
        register(
            id="sb3_per/BlindCliffwalk-v0",
            entry_point="sb3_per_envs.blind_cliffwalk:BlindCliffwalkEnv",
        )
