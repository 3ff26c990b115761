"""Graders at work: they give answers rewards. The types are in ft_service/spec/graders.py.

grading            a grader from a request, checked; rewards of answers
grades             an answer with its item, its score, its grade, and kinds of errors
templates          `{{ item.key }}` and `{{ sample.output_text }}` in texts
formula            the formula of a multi grader
texts              graders that compare texts; what a grader gives as a whole
text_tasks         what is computed on texts of tenants
text_processes     the processes in which that is done for the service
text_program       the program in those processes
similarities       metrics that compare two texts
limits             what the operator allows: models that grade, addresses, python
asking             graders that ask a server: score_model, label_model, endpoint
python_fence       the process in which a python grader runs, without network and files
fenced_program     the program in that process
system_calls       the system calls that it may make
"""
