"""Control of jobs: who may enter, what is checked, what comes next, and what is tidied up."""
