# pip install trl==1.16.0
python trl_program_argparse.py --steps 40 --lr 2e-6 --data someone/sums
