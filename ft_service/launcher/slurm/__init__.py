"""Launcher for Slurm: one batch job per attempt, in which `srun` starts our supervisor on each
node.

slurm_profile.py    the operator's settings of batch jobs (FT_SLURM_PROFILE)
batch_script.py     attempt + profile → arguments of sbatch, and the script; pure
slurm_commands.py   Slurm's command-line programs
slurm_states.py     state of a batch job → state of the attempt; pure
slurm_launcher.py   the launcher
"""
