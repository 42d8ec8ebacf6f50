"""What a step consists of, apart from any machine: the model's operators, FLOPs, formats, layouts, schedules."""
