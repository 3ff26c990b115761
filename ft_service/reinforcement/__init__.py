"""Reinforcement learning: the model answers prompts, a grader gives rewards, and the ranks train on
the better answers.

    prompts ──▶ sample ──▶ grade ──▶ record of the step ──▶ commands ──▶ ranks
    (ft_service/control/reinforcement/reinforcement_jobs.py)

prompt_file      the job's prompts as tokens, which its ranks write
schedule         which prompts a step has, and what is due at it
advantages       rewards of a group as advantages, and their weights in the loss
step_records     what was sampled and graded for a step: a file that is written before anything is
                 trained on it
step_texts       the answers' texts and rewards of a step, for people
trajectories     rows of a rollout whose model was called several times: what was sampled, by token
step_commands    the commands that follow from a record (ft_service/tinker/commands.py)
"""
