"""Real forms of answers, and what each must score. A wrong answer that scores is worse than a right one that does not.

Right answers that score 0, and why, are in `LIMITS`.
"""

from __future__ import annotations

from jaxrl_llm.tasks import choice, code, gsm8k, math, verl
from jaxrl_llm.tasks import format as forms

# What the box holds, the answer of the row, what it scores.
MATH = [
    ("√1,000", "10\\sqrt{10}", 1), ("√1,000", "1000", 0), ("³√8", "2", 1), ("⁴√16", "2", 1), ("∜16", "2", 1),
    ("√½", "\\frac{\\sqrt2}{2}", 1), ("√(2(3+5))", "4", 1), ("√(2(3+5))", "16", 0), ("∛(2(3+1))", "2", 1),
    ("2√(2(3+5))+1", "9", 1), ("√(√16)", "2", 1), ("√(1+√(9))", "2", 1), ("√\\left(2(3+5)\\right)", "4", 1),
    ("√(a)(b)", "b\\sqrt{a}", 1), ("√(2(3+5)", "4", 0), ("√\\frac14", "\\frac12", 1), ("√\\frac14", "\\frac14", 0),
    ("√\\frac{\\sqrt{1}}{4}", "0.5", 1), ("√\\dfrac{9}{4}", "1.5", 1), ("√(1,000)", "10\\sqrt{10}", 1),
    ("√(1,000)", "1000", 0), ("√(1,000,000)", "1000", 1), ("√(1,2)", "\\sqrt{12}", 0), ("√-4", "2i", 1),
    ("√−4", "2i", 1), ("√(-4)", "2i", 1), ("√-4", "-2", 0), ("√-4", "2", 0), ("√-4", "-2i", 0), ("3+√-16", "3+4i", 1),
    ("3+√-16", "3-4i", 0), ("2i", "\\sqrt{-4}", 1), ("\\sqrt{-4}", "2", 0), ("i^2", "-1", 1), ("e^{i\\pi}", "-1", 1),
    ("e^{i\\pi}", "1", 0), ("|3+4i|", "5", 1), ("|3+4i|", "7", 0), ("i", "1", 0), ("5", "5i", 0),
    ("(1,i)", "(1,2)", 0), ("\\sqrt(16)", "4", 1), ("\\sqrt(16)", "16", 0), ("\\binom52", "10", 1),
    ("\\binom{5}2", "10", 1), ("\\dbinom52", "10", 1), ("\\binom52", "\\frac52", 0), ("⁴√16", "16", 0),
    ("2³√8", "4", 0), ("√{x²+1}", "\\sqrt{x^2+1}", 1), ("√(x²+1)", "\\sqrt{x^2+1}", 1), ("ABC", "CBA", 0),
    ("BCA", "ABC", 0), ("AB", "BA", 1),
    # what SymPy or a parser may take for equal
    ("\\infty", "1,2", 0), ("10^\\infty", "1,2", 0), ("\\pi10^\\infty", "1,2", 0), ("\\pi10^\\infty", "\\{1,2\\}", 0),
    ("\\pi10^\\infty", "5", 0), ("\\pi10^\\infty", "(1,2)", 0), ("\\pi10^\\infty", "x+1", 0),
    ("10^\\infty", "3,4,5", 0), ("\\infty\\cdot x", "1,2", 0), ("5", "10^\\infty", 0),
    ("\\frac{1}{2}\\text{ or maybe }\\frac{1}{3}", "\\frac12", 0), ("?? \\frac{1}{2} ??", "\\frac12", 0),
    ("\\frac{1}{2}; \\frac{1}{3}", "\\frac12", 0), ("\\frac{1}{2} \\frac{1}{3}", "\\frac12", 0),
    ("answer: 5", "5", 0), ("\\text{the final answer is } \\frac12", "\\frac12", 0), ("\\mathbb{R}", "1,2", 0),
    ("\\mathbb{R}", "[1,2]", 0), ("(-\\infty,\\infty)", "[1,2]", 0), ("\\emptyset", "1,2", 0),
    ("\\emptyset", "[1,2]", 0), ("\\{x\\}", "1,2", 0), ("x,y", "1,2", 0), ("\\text{nan},\\text{nan}", "1,2", 0),
    ("\\frac{0}{0},1", "1,2", 0), ("\\frac00", "5", 0), ("\\frac{1}{0}", "1,2", 0), ("\\infty-\\infty", "0", 0),
    ("\\infty-\\infty", "5", 0), ("0\\cdot\\infty", "5", 0), ("1^\\infty", "1", 0), ("x", "5", 0), ("x=x", "5", 0),
    ("5=5=6", "5", 0), ("\\text{any}", "5", 0), ("\\forall x", "5", 0), ("\\pm 5", "5", 0),
    ("\\lim_{x\\to 0} x", "0", 1), ("\\int_0^1 x dx", "\\frac12", 1), ("\\ldots", "1,2", 0),
    ("1,\\ldots,2", "1,2", 0), ("1,2,...", "1,2", 0), ("1<x", "x>1", 1), ("x<1", "x>1", 0), ("True", "1", 0),
    ("1=1", "\\text{True}", 0), ("1<2", "\\text{True}", 0), ("1<2", "x>1", 0), ("x \\in \\mathbb{R}", "x>1", 0),
    ("1,2,\\ldots", "1,2", 0), ("-\\infty x", "5", 0), ("72...", "72", 0), ("(-\\infty, 3)", "(-\\infty,3)", 1),
    ("[2, \\infty)", "x\\ge 2", 1), ("+\\infty", "\\infty", 1),
    ("\\{-\\infty,\\infty\\}", "\\{\\infty,-\\infty\\}", 1), ("\\lim_{x\\to\\infty} \\frac{1}{x}", "0", 1),
    ("\\sum_{n=1}^{\\infty} \\frac{1}{2^n}", "1", 1), ("\\int_0^\\infty e^{-x} dx", "1", 1), ("5 7", "12", 0),
    ("5\\ 7", "12", 0), ("5 \\frac12", "5.5", 1), ("1 234", "1234", 1), ("1 2/3", "5/3", 1), ("1, 2", "1,2", 1),
    ("1, 2", "2,1", 1), ("1; 2", "1,2", 1), ("1, 2, 3", "1,2,3", 1), ("1.5, 2", "1.5,2", 1), ("1, 3", "1,2", 0),
    # times, dates and words
    ("12:30", "12:30 PM", 0), ("12:30 AM", "12:30 PM", 0), ("12:30 p.m.", "12:30\\text{ PM}", 1),
    ("June 21", "June 20", 0), ("Tom", "Mot", 0), ("Mot", "Tom", 0), ("\\text{nan}", "0", 0),
    ("\\text{no solution}", "\\text{No solution}", 1), ("4:05 AM", "4:05 PM", 0), ("16:05", "4:05 PM", 0),
    ("4 PM", "4", 0), ("4 p.m.", "4\\text{ PM}", 1), ("20 June 2024", "June 21, 2024", 0), ("July 20", "June 20", 0),
    ("\\text{Tom and Ann}", "Ann and Tom", 0), ("\\text{I don't know}", "72", 0),
    # √, powers and fractions as Unicode writes them
    ("3 × 10⁸", "3e8", 1), ("∅", "\\emptyset", 1), ("√12", "2\\sqrt{3}", 1), ("√12", "2", 0), ("√16", "6", 0),
    ("√16", "4", 1), ("√(16)", "4", 1), ("√2/2", "\\frac{\\sqrt2}{2}", 1), ("x²+1", "x^2+1", 1), ("10⁻³", "0.001", 1),
    ("½", "0.5", 1), ("1½", "1.5", 1), ("2¾", "11/4", 1), ("2⁵", "32", 1), ("2⁻¹", "0.5", 1), ("x⁻¹", "1/x", 1),
    ("xⁿ", "x^n", 1), ("x₁", "x_1", 1), ("101₂", "101_2", 1), ("101₂", "101_3", 0), ("⅔", "2/3", 1), ("2⅔", "8/3", 1),
    ("¾", "0.57", 0), ("√2", "2", 0), ("2√3", "√12", 1), ("∛8", "2", 1), ("∛27", "9", 0), ("9.8 m/s²", "9.8", 1),
    ("6.02 × 10²³", "6.02\\times10^{23}", 1), ("6.02 × 10²²", "6.02\\times10^{23}", 0),
    # units
    ("5 \\text{ million}", "5", 0), ("5 \\text{ million}", "5000000", 1), ("5 million", "5", 0),
    ("5 million", "5000000", 1), ("25 square units", "25", 1), ("25 sq. units", "25", 1),
    ("5\\,\\text{m/s}^2", "5", 1), ("5\\text{ m}\\cdot\\text{s}^{-1}", "5", 1), ("\\sin 30^\\circ", "1/2", 1),
    ("\\sin(30^\\circ)", "1/2", 1), ("\\cos 60°", "\\frac12", 1), ("72 \\text{ (apples)}", "72", 1),
    ("72 (apples)", "72", 1), ("\\$32,\\!348", "32348", 1), ("2.5\\text{ million dollars}", "2500000", 1),
    ("\\$2.5 million", "2500000", 1), ("1/2 cup", "0.5", 1), ("\\frac{1}{2}\\text{ cup}", "0.5", 1),
    ("x = 5 cm", "5", 1), ("30°", "30", 1), ("30^{\\circ}", "30", 1), ("30\\text{ degrees}", "30", 1),
    ("30^\\circ\\text{C}", "30", 1), ("30°C", "30", 1), ("-30°F", "30", 0), ("\\tan 45^\\circ", "1", 1),
    ("\\sin(60°)", "\\frac{\\sqrt3}{2}", 1), ("\\sin 60^\\circ", "0.5", 0),
    ("(-\\infty, 0) \\cup (0, \\infty)", "(-\\infty,0)\\cup(0,\\infty)", 1), ("5.00\\text{ dollars}", "5", 1),
    ("\\$5.50", "5.5", 1), ("5.5 dollars", "5", 0), ("5\\,cm", "5", 1), ("5\\;\\text{N}\\cdot\\text{m}", "5", 1),
    ("9.8 m/s^2", "9.8", 1), ("72\\checkmark", "72", 0), ("5cm", "5", 1), ("5kg", "5", 1), ("2ml", "2", 1),
    ("60km/h", "60", 1), ("\\$1{,}000", "1000", 1), ("\\text{\\$5}", "5", 1), ("£18", "18", 1),
    ("5 thousand miles", "5000", 1),
    # magnitudes, percent, numbers
    ("3 x 10^8", "3e8", 1), ("3*10^8", "3e8", 1), ("3x10^8", "300000000", 1), ("\\varnothing", "\\emptyset", 1),
    ("100%", "100", 1), ("100\\%", "1", 1), ("1%", "0.01", 1), ("1%", "100", 0), ("3.0\\times10^8", "3e8", 1),
    ("50 percent", "50", 1), ("50\\text{ percent}", "0.5", 1), ("5\\text{ dozen}", "5", 0), ("5 dozen", "60", 1),
    ("5 hundred", "500", 1), ("\\mathbb{R}", "(-\\infty,\\infty)", 1), ("5th", "5", 1), ("5^{\\text{th}}", "5", 1),
    ("6.02e23", "6.02\\times10^{23}", 1), ("3 x 10^7", "3e8", 0), ("3x10^8", "3e8", 1), ("x10", "10", 0),
    ("\\mathbf{72}", "72", 1),
    # bases
    ("52", "52_8", 0), ("42", "52_8", 0), ("52_{\\text{eight}}", "52_8", 1), ("1A_{16}", "1a_{16}", 1),
    # sets, tuples, intervals
    ("C(5,2)", "10", 1), ("\\{1,2\\}", "(1,2)", 0), ("(1,2)", "1,2", 1), ("[-5,-3]", "[-3,-5]", 0),
    ("(3,π/2)", "(3,\\frac{\\pi}{2})", 1), ("(5,6)", "5", 0), ("[5,6]", "5", 0), ("\\{1, 2\\}", "\\{2,1\\}", 1),
    ("\\{1,2\\}", "\\{1,3\\}", 0), ("\\{1,2\\}", "[1,2]", 0), ("\\left\\{1,2\\right\\}", "(1,2)", 0),
    ("(1,2)", "(1,2]", 0), ("[-2, -1]", "[-2,-1]", 1), ("[-2,-1]", "[-2,1]", 0), ("(-3,-1)", "(-1,-3)", 0),
    ("x \\in (-3,-1)", "(-3,-1)", 1), ("C(5,2)", "20", 0), ("P(5,2)", "20", 0),
    # variables
    ("2", "2t", 0), ("5", "5m", 0), ("x+2", "x+2c", 0), ("ba", "ab", 1), ("not 5", "5", 0), ("\\neq 5", "5", 0),
    ("5\\ldots", "5", 1), ("x=5", "5", 1), ("x \\neq 5", "5", 0), ("x\\ne 5", "5", 0), ("x>5", "5", 0),
    ("2x=6", "3", 0), ("2X", "2x", 0), ("\\geq 5", "5", 0), ("\\le 5", "5", 0), ("5\\times", "5", 0),
    ("2 pi", "2", 0), ("2 sin x", "2", 0), ("2\\sin x", "2", 0), ("3x", "3", 0), ("3 x", "3", 0), ("3y^2", "3", 0),
    ("3ab", "3", 0), ("3abc", "3", 0), ("5i", "5", 0), ("5e", "5", 0), ("5 i", "5", 0), ("5a", "5", 0),
    ("X^2", "x^2", 0),
    # others
    ("3:30", "1:10", 1), ("\\binom{5}{2}", "10", 1), ("{}_5C_2", "10", 1), ("\\text{A and C}", "A, C", 1),
    ("A \\text{ and } C", "A,C", 1), ("\\{\\}", "\\emptyset", 1), ("\\text{empty set}", "\\emptyset", 1),
    ("about 72", "72", 1), ("approximately 72", "72", 1), ("\\text{about } 72", "72", 1), ("\\sim 72", "72", 1),
    ("0.785398", "\\pi/4", 1), ("1.000.000", "1000000", 0), ("5 or 6", "5", 0), ("5\\text{ or }6", "5", 0),
    ("5 \\text{ or six}", "5", 0), ("5!", "5", 0), ("72\\text{ because } 8\\cdot 9=72", "72", 1), ("1,2", "12", 0),
    ("12", "1,2", 0), ("2,1", "1,2", 1), ("\\langle 1,2\\rangle", "(1,2)", 1),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\3\\end{pmatrix}", 0), ("-2..3", "-2", 0),
    ("fifty", "50", 0), ("1/3", "0.333333", 1), ("1/3", "0.3333", 0), ("2,5", "2.5", 0), ("1 1/2", "1.5", 1),
    ("1\\ 1/2", "1.5", 1), ("1-1/2", "1.5", 0), ("-1\\frac12", "-1.5", 1), ("3\\frac{1}{4}", "3/4", 0),
    ("x \\approx 5", "5", 1), ("5 \\pm 1", "5", 0), ("5 = 5", "5", 1), ("6=5", "6", 0), ("2+3", "5", 1),
    ("\\infty", "-\\infty", 0), ("3:4", "\\frac34", 1), ("-2,1", "1,-2", 1), ("-2\\le x\\le 7", "[-2,7]", 1),
    ("y=-3x+2", "-3x+2", 1), ("\\log_{10}100", "2", 1), ("A, C", "A,C", 1), ("C, A", "A,C", 1), ("A, D", "A,C", 0),
    ("B. 5", "B", 1), ("1 000 000", "1000000", 1), ("-1 1/2", "-3/2", 1), ("x=1, y=2", "1,2", 1),
    ("a=1,b=2", "a=2,b=1", 0), ("8\\cdot 9=72", "72", 1), ("8\\cdot 9=71", "72", 0), ("\\lfloor 7.5\\rfloor", "7", 1),
    ("10!", "3628800", 1), ("\\frac{0}{0}", "0", 0), ("\\frac{1}{0}", "\\infty", 0), ("5\\text{ or }7", "5,7", 1),
    ("5 and 7", "5,7", 1), ("5, 6, 7", "5", 0), ("x=5\\text{ or }x=6", "5", 0), ("x=5\\text{ or }x=6", "x=5", 0),
    ("5\\text{ not }6", "6", 0), ("5\\text{ (or six)}", "5", 0), ("5 (or six)", "5", 0), ("5 (maybe six)", "5", 1),
    ("between 5 and 6", "5", 0), ("at least 5", "5", 0), ("<5", "5", 0), ("5+", "5", 0), ("5-", "5", 0),
    ("2 pi", "2\\pi", 1), ("\\tan 45", "1", 0), ("3\\tfrac12", "3.5", 1), ("3 \\frac{1}{2}", "3.5", 1),
    ("3 1/2", "3.5", 1), ("3-1/2", "3.5", 0), ("3+1/2", "3.5", 1), ("x_1", "x_2", 0), ("|x|", "\\sqrt{x^2}", 1),
    ("-3 < x < -1", "(-3,-1)", 1), ("-3 < x < 1", "(-3,-1)", 0), ("x \\neq 0", "(-\\infty,0)\\cup(0,\\infty)", 1),
    ("\\{0\\}", "\\varnothing", 0), ("0", "\\emptyset", 0), ("\\text{no solution}", "0", 0), ("4:05", "4:50", 0),
    ("12,345", "12345", 1), ("12.345", "12345", 0), ("1,23", "123", 0), ("12,34,567", "1234567", 0),
    ("0.3", "1/3", 0), ("0.33", "1/3", 0), ("0.333333", "1/3", 1), ("3.14", "\\pi", 0), ("22/7", "\\pi", 0),
    ("3.141593", "\\pi", 1), ("1.4142", "\\sqrt2", 0), ("0.1\\overline{6}", "1/6", 1), ("0.16", "1/6", 0),
    ("\\frac{a}{b}", "a/b", 1), ("\\frac{a}{b}", "b/a", 0), ("(x+1)(x-1)", "x^2-1", 1), ("(x+1)(x+1)", "x^2+1", 0),
    ("x^2-1=0", "x^2-1", 0), ("\\ln e", "1", 1), ("\\log 100", "2", 1), ("\\sum_{i=1}^{3} i", "6", 1),
    ("\\binom{5}{2}", "\\binom{5}{3}", 1), ("^5C_2", "10", 1), ("\\frac{5!}{2!3!}", "10", 1), ("3+4i", "3-4i", 0),
    ("4i+3", "3+4i", 1), ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\4&3\\end{pmatrix}", 0),
    ("\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", 1),
    ("\\text{The answer is 5}", "5", 0), ("5.0", "5", 1), ("1:2", "2:1", 0), ("2:4", "1:2", 1), ("1:2:4", "1:2:3", 0),
    ("10x", "10", 0), ("\\approx 3.15", "3.14", 0), ("roughly 72", "72", 1), ("72 or so", "72", 0),
    ("\\boldsymbol{72}", "72", 1), ("\\textbf{72}", "72", 1), ("\\underline{72}", "72", 1),
    ("\\color{red}{72}", "72", 1), ("\\displaystyle 72", "72", 1), ("\\displaystyle\\frac12", "1/2", 1),
    ("\\dots", "72", 0), ("\\Delta", "\\delta", 0), ("\\textcolor{blue}{7}", "7", 1),
    # numbers near 0
    ("1.6\\times10^{-19}", "6.626\\times10^{-34}", 0), ("-1.6\\times10^{-19}", "1.6\\times10^{-19}", 0),
    ("1.6\\times10^{-19}", "1.6\\times10^{-19}", 1), ("1.60\\times 10^{-19}", "1.6e-19", 1),
    ("16\\times10^{-20}", "1.6\\times10^{-19}", 1), ("\\frac{16}{10^{20}}", "1.6\\times10^{-19}", 1),
    ("1.7\\times10^{-19}", "1.6\\times10^{-19}", 0), ("0", "1.6\\times10^{-19}", 0), ("1.6\\times10^{-19}", "0", 0),
    ("3\\times10^{-16}", "7\\times10^{-16}", 0), ("10^{-30}", "10^{-31}", 0), ("10^{-30}", "\\frac{1}{10^{30}}", 1),
    ("2^{-100}", "\\frac{1}{2^{100}}", 1), ("2^{-100}", "2^{-101}", 0),
    ("\\pi\\times10^{-20}", "3.14159265\\times10^{-20}", 1), ("\\pi\\times10^{-20}", "3.2\\times10^{-20}", 0),
    ("1.6\\times10^{-19}\\text{ C}", "1.6\\times10^{-19}", 1), ("(10^{-20},1)", "(10^{-21},1)", 0),
    ("10^{-20},1", "10^{-21},1", 0), ("(10^{-20},1)", "(10^{-20},1)", 1), ("[0,10^{-20}]", "[0,10^{-21}]", 0),
    ("10^{-20}x", "10^{-21}x", 0), ("10^{-20}i", "10^{-21}i", 0), ("e^{-50}", "e^{-51}", 0),
    ("e^{-50}", "\\frac{1}{e^{50}}", 1), ("\\sqrt{10^{-40}}", "10^{-20}", 1), ("x=10^{-20}", "10^{-21}", 0),
    ("x=10^{-20}", "10^{-20}", 1), ("6.626\\times10^{-34}\\text{ J s}", "6.626\\times10^{-34}", 1),
    ("\\sqrt{1/n}", "1/\\sqrt n", 1), ("\\sqrt{\\frac1n}", "\\frac{1}{\\sqrt{n}}", 1),
    ("-1 + exp(16)", "e^{16}-1", 1), ("14.0 + -1.0i", "14-i", 1), ("14 + -1i", "14-i", 1),
    ("x<2 or x>3", "(-\\infty,2)\\cup(3,\\infty)", 1), ("x<2\\text{ or }x>3", "(-\\infty,2)\\cup(3,\\infty)", 1),
    ("0.00000000000000000016", "1.6\\times10^{-19}", 1), ("0.00000000000000000017", "1.6\\times10^{-19}", 0),
    ("1+10^{-20}", "1", 0), ("10^{20}+1", "10^{20}", 0), ("1.0000000001", "1", 0), ("0.1+0.2", "0.3", 1),
    ("10^{-7}", "2\\times 10^{-7}", 0), ("\\frac{1}{3}\\times10^{-19}", "3.33333\\times10^{-20}", 1),
    ("\\frac{1}{3}\\times10^{-19}", "3.33333333\\times10^{-20}", 1),
    # programs, marks, repeated decimals and inequalities
    ("0.142857142857...", "1/7", 1), ("0.1666...", "1/6", 1), ("0.\\dot12\\dot3", "\\frac{41}{333}", 1),
    ("0.1\\bar6", "1/6", 1), ("12\\overline{3}", "3", 0), ("\\overline{7}", "7", 0), ("1\\overline{2}", "2", 0),
    ("0.(142857)", "1/7", 1), ("0.333\\ldots", "1/3", 1), ("0.33...", "1/3", 0), ("3.(14)", "3.14", 0),
    ("f(3)", "3", 0), ("x^-1.5", "x^{-3/2}", 1), ("10^-3", "0.001", 1), ("2 ** 10", "1024", 1), ("+-3", "3", 0),
    ("5 + -3", "2", 1), ("5+-3", "8", 0), ("x + -3", "x-3", 1), ("x < 2 or x < 3", "(-\\infty,3)", 1),
    ("x>5 and x>7", "(5,7)", 0), ("x<2 or y>3", "(-\\infty,2)\\cup(3,\\infty)", 0),
    ("x\\le 2 or x>3", "(-\\infty,2)\\cup(3,\\infty)", 0),
    ("x \\leqslant 2 \\vee x \\geqslant 3", "(-\\infty,2]\\cup[3,\\infty)", 1), ("x>2 and x<5", "(2,5)", 1),
    ("x<5 and x>2", "2<x<5", 1), ("x<5 \\land x>2", "(2,5]", 0), ("\\frac\\pi4", "\\frac{\\pi}{4}", 1),
    ("\\frac1\\pi", "1/\\pi", 1), ("\\frac1n", "\\frac{1}{n}", 1), ("\\frac\\pi2", "\\frac\\pi3", 0),
    ("\\frac12\\pi", "\\frac{\\pi}{2}", 1), ("\\nicefrac{1}{2}", "2", 0),
    ("\\sqrt{\\frac{1}{n}}", "\\frac{1}{\\sqrt{n}}", 1), ("\\sqrt{\\frac{1}{n}}", "\\frac{1}{\\sqrt{m}}", 0),
    ("|x|", "x", 0), ("\\sqrt{x^2}", "x", 0), ("\\sqrt{\\frac{x^2}{y^2}}", "\\frac{x}{y}", 0),
    ("\\sqrt{\\frac{3}{4n}}", "\\frac{\\sqrt3}{2\\sqrt n}", 1), ("C_{10}^{3}", "120", 1), ("C_5^2", "10", 1),
    ("C_5^2", "25", 0), ("1.6\\times10^{-19}\\,\\mathrm{C}", "1.6\\times10^{-18}", 0), ("0.00012", "0.000124", 0),
    ("0.0000001", "1\\times10^{-7}", 1), ("3\\ \\mathrm{kg\\,m/s^2}", "3", 1), ("3\\,\\mathrm{m^2}", "3", 1),
    ("\\texttt{13}", "13", 1), ("\\emph{Yes}", "yes", 1), ("e^-2", "e^{-2}", 1), ("2sin(x)cos(x)", "\\sin 2x", 1),
    ("exp(i*pi)", "-1", 1), ("ln(8)/ln(2)", "3", 1), ("3-2.0i", "3-2i", 1), ("3-2.0i", "3+2i", 0),
    ("0.5+0.5i", "\\frac{1+i}{2}", 1),
    # one answer in many forms
    ("(\\sqrt2)^2-2", "0", 1), ("\\sin(\\pi)", "0", 1), ("0.0000001", "10^{-7}", 1), ("0.0000001", "0", 0),
    ("0.0000001", "0.0000002", 0), ("0.000333", "\\frac{1}{3000}", 0), ("\\frac{1}{3000}", "0.000333333", 1),
    ("5\\times10^{-4}", "0.0005", 1), ("5e-4", "0.0005", 1), ("0.05\\%", "0.0005", 1),
    ("\\{10^{-20},2\\}", "\\{2,10^{-20}\\}", 1), ("1.6 \\cdot 10^{-19}", "1.6\\times10^{-19}", 1),
    ("1.6*10^{-19}", "1.6\\times10^{-19}", 1), ("1.6 x 10^{-19}", "1.6e-19", 1),
    ("1.6 × 10⁻¹⁹", "1.6\\times10^{-19}", 1), ("1.6E-19", "1.6\\times10^{-19}", 1),
    ("-1.6\\times10^{-19}", "-1.6e-19", 1), ("1.6\\times 10^{-19}\\,\\mathrm{C}", "1.6\\times10^{-19}", 1),
    ("6.63\\times10^{-34}\\ \\text{J}\\cdot\\text{s}", "6.63\\times10^{-34}", 1), ("`13`", "13", 1),
    ("$`13`$", "13", 1), ("exp(2)", "e^2", 1), ("\\exp(2)", "e^2", 1), ("exp(-x)", "e^{-x}", 1),
    ("2exp(3)", "2e^3", 1), ("sqrt(2)", "\\sqrt2", 1), ("sqrt(2)/2", "\\frac{1}{\\sqrt2}", 1),
    ("sin(x)", "\\sin x", 1), ("ln(2)", "\\ln 2", 1), ("log(100)", "2", 1), ("2*sqrt(3)", "2\\sqrt3", 1),
    ("sqrt(x+1)", "\\sqrt{x+1}", 1), ("pi/4", "\\frac{\\pi}{4}", 1), ("3pi", "3\\pi", 1), ("2*pi", "2\\pi", 1),
    ("x^(1/2)", "\\sqrt{x}", 1), ("x**2", "x^2", 1), ("2**10", "1024", 1), ("2^10", "1024", 1), ("2^{10}", "1024", 1),
    ("x^10", "x^{10}", 1), ("(x+1)^(2)", "x^2+2x+1", 1), ("1/(2n)", "\\frac{1}{2n}", 1),
    ("n(n+1)/2", "\\frac{n(n+1)}{2}", 1), ("n*(n+1)/2", "\\frac{n^2+n}{2}", 1), ("14-1i", "14-i", 1),
    ("14 - 1.0i", "14-i", 1), ("1+2i", "2i+1", 1),
    ("x \\le 2 \\text{ or } x \\ge 3", "(-\\infty,2]\\cup[3,\\infty)", 1),
    ("x > 3 or x < 2", "(-\\infty,2)\\cup(3,\\infty)", 1), ("x<2\\text{ or }x>3", "x>3\\text{ or }x<2", 1),
    ("x < -1 \\text{ or } x > 1", "(-\\infty,-1)\\cup(1,\\infty)", 1),
    ("x<2 or x>4", "(-\\infty,2)\\cup(3,\\infty)", 0), ("x\\leq 2 \\lor x\\geq 3", "(-\\infty,2]\\cup[3,\\infty)", 1),
    ("(2,\\infty)", "x>2", 1), ("x>2", "(2,\\infty)", 1), ("2<x", "(2,\\infty)", 1),
    ("x \\geq 2 \\text{ and } x \\leq 5", "[2,5]", 1), ("n = 7", "7", 1), ("7 \\text{ ways}", "7", 1),
    ("\\$7", "7", 1), ("7\\,\\text{ways}", "7", 1), ("7 \\text{ (mod 10)}", "7", 0), ("\\text{7}", "7", 1),
    ("\\mathrm{7}", "7", 1), ("{7}", "7", 1), ("((7))", "7", 1), ("(7)", "7", 1), ("[7]", "7", 1),
    ("\\left(7\\right)", "7", 1), ("7.0000", "7", 1), ("+7", "7", 1), ("007", "7", 1), ("7\\%", "0.07", 1),
    ("7 %", "7", 1), ("−7", "-7", 1), ("- 7", "-7", 1), ("\\frac{7}{1}", "7", 1), ("\\frac{14}{2}", "7", 1),
    ("\\tfrac{1}{2}", "0.5", 1), ("\\cfrac{1}{2}", "0.5", 1), ("1⁄2", "0.5", 1), ("\\nicefrac{1}{2}", "0.5", 1),
    ("\\sfrac{1}{2}", "0.5", 1), ("\\frac{1}{2}\\pi", "\\frac{\\pi}{2}", 1), ("\\frac12\\ln 2", "\\ln\\sqrt2", 1),
    ("\\log_2 8", "3", 1), ("\\ln 8", "3\\ln 2", 1), ("\\arctan 1", "\\frac\\pi4", 1),
    ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}", 1), ("\\frac{1}{1+\\sqrt2}", "\\sqrt2-1", 1),
    ("\\sqrt[3]{8}", "2", 1), ("2^{1/2}", "\\sqrt2", 1), ("\\sqrt{n}/n", "\\frac{1}{\\sqrt n}", 1),
    ("\\sqrt{\\frac{a}{b}}", "\\frac{\\sqrt a}{\\sqrt b}", 1),
    ("\\sqrt{\\frac{2}{\\pi n}}", "\\frac{\\sqrt2}{\\sqrt{\\pi n}}", 1), ("\\sqrt{\\frac{1}{n}}", "\\frac1n", 0),
    ("\\sqrt{x/2}", "\\frac{\\sqrt{2x}}{2}", 1), ("(3, 4)", "(3,4)", 1), ("(3;4)", "(3,4)", 1),
    ("\\left( 3, 4 \\right)", "(3,4)", 1), ("(3.0, 4.0)", "(3,4)", 1), ("x=3, y=4", "(3,4)", 1),
    ("(x,y)=(3,4)", "(3,4)", 1), ("(x, y) = (3, 4)", "(3,4)", 1),
    ("\\begin{pmatrix}3\\\\4\\end{pmatrix}", "\\begin{pmatrix} 3 \\\\ 4 \\end{pmatrix}", 1), ("\\{3,4\\}", "3,4", 1),
    ("3, 4", "\\{3,4\\}", 1), ("x=3 or x=4", "3,4", 1), ("x = 3, 4", "3,4", 1), ("x_1=3,x_2=4", "3,4", 1),
    ("x \\in \\{3,4\\}", "3,4", 1), ("3 \\text{ and } 4", "3,4", 1), ("3\\text{ or }4", "\\{3,4\\}", 1),
    ("\\pm 3", "3,-3", 1), ("\\pm 3", "\\{-3,3\\}", 1), ("3,-3", "\\pm 3", 1), ("x=\\pm 3", "\\pm 3", 1),
    ("2\\pm\\sqrt3", "2+\\sqrt3,2-\\sqrt3", 1), ("\\pm\\sqrt2", "\\sqrt2,-\\sqrt2", 1), ("\\text{True}", "True", 1),
    ("\\text{yes}", "Yes", 1), ("YES", "yes", 1), ("\\text{Yes.}", "Yes", 1), ("\\textit{yes}", "yes", 1),
    ("\\mathit{yes}", "yes", 1), ("\\text{ even}", "even", 1), ("\\text{even}", "Even", 1),
    ("\\emph{even}", "even", 1), ("\\text{Evelyn}", "Evelyn", 1), ("\\mathrm{Evelyn}", "\\text{Evelyn}", 1),
    ("\\text{east}", "East", 1), ("1,000,000", "10^6", 1), ("1.5\\times10^3", "1500", 1), ("1500.00", "1500", 1),
    ("1.5k", "1500", 0), ("2/4", "1/2", 1), ("\\frac{-1}{2}", "-\\frac12", 1), ("-\\frac{1}{2}", "\\frac{1}{-2}", 1),
    ("\\frac{x}{2}", "0.5x", 1), ("x/2", "\\frac12x", 1), ("3^{-1}", "1/3", 1),
    ("\\frac{1}{3}", "0.\\overline{3}", 1), ("0.333...", "1/3", 1), ("0.\\dot{3}", "1/3", 1),
    ("0.\\bar{3}", "1/3", 1), ("0.(3)", "1/3", 1), ("1.\\overline{27}", "\\frac{14}{11}", 1),
    ("f(x)=2x+1", "2x+1", 1), ("y=2x+1", "y = 2x + 1", 1), ("2x+1=y", "y=2x+1", 1), ("2x - y + 1 = 0", "y=2x+1", 1),
    ("f(x) = 2x + 1", "f(x)=1+2x", 1), ("x^2+y^2=4", "x^2 + y^2 - 4 = 0", 1), ("\\sin^2 x", "(\\sin x)^2", 1),
    ("1-\\cos^2 x", "\\sin^2 x", 1), ("\\tan x", "\\frac{\\sin x}{\\cos x}", 1), ("2\\sin x\\cos x", "\\sin 2x", 1),
    ("90°", "90", 1), ("90 degrees", "90", 1), ("\\frac{\\pi}{2}\\text{ radians}", "\\frac{\\pi}{2}", 1),
    ("45^{\\circ}", "45^\\circ", 1), ("3 \\text{ cm}^2", "3", 1), ("3\\,\\mathrm{cm^2}", "3", 1), ("3 m/s^2", "3", 1),
    ("3\\ \\mathrm{m/s}", "3", 1), ("12\\pi \\text{ cm}^3", "12\\pi", 1), ("12\\pi\\ \\mathrm{cm}^3", "12\\pi", 1),
    ("n!", "n!", 1), ("\\frac{n!}{2}", "n!/2", 1), ("\\dbinom{n}{2}", "\\frac{n(n-1)}{2}", 1),
    ("\\binom{10}{3}", "120", 1), ("{10 \\choose 3}", "120", 1), ("C_{10}^3", "120", 1),
    ("2^{2024}-1", "2^{2024}-1", 1), ("2^{2024}", "2\\cdot2^{2023}", 1), ("\\lfloor \\frac{7}{2}\\rfloor", "3", 1),
    ("\\lceil 3.2\\rceil", "4", 1), ("|-7|", "7", 1), ("7 \\pmod{10}", "7 \\pmod{10}", 1),
    ("7\\equiv 17 \\pmod{10}", "7", 0), ("\\boxed{7}", "7", 1), ("\\fbox{7}", "7", 1), ("\\mbox{7}", "7", 1),
    ("\\textbf{(C) } 7", "C", 1), ("\\text{C}", "C", 1), ("(C)", "C", 1), ("C.", "C", 1), ("\\mathrm{(C)}", "C", 1),
    ("\\textbf{C}", "C", 1), ("\\mathbf{(C)}", "C", 1), ("C) 7", "C", 1), ("\\text{Choice C}", "C", 1),
    ("C: 7", "C", 1),
]  # fmt: skip
LIMITS = {
    ("2x=6", "3"): "an equation is not its solution",
    ("1.000.000", "1000000"): "a point is the decimal separator: 1.000 is 1",
    ("fifty", "50"): "numbers in words are not read",
    ("20 June", "June 20"): "a date has one order; math-verify sees a product of other letters",
    ("-5 to 3", "[-5,3]"): "a range in words is no interval",
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(1,2)"): "a column is no point for math-verify",
    ("5 kg m/s", "5"): "a unit is one word, or words with spaces or a stroke",
    ("16:05", "4:05 PM"): "hours are not converted",
    ("7_{10}", "7"): "a number with a base equals digits of this base alone",
    ("3\\,\\Omega", "3"): "a Greek letter beside a number is a variable",
    ("**72** apples", "72"): "bold text is read around the whole answer alone",
}
# Wrong or careless answers that score 1, because data sets need the rule.
LENIENT = {
    ("(2,1)", "1,2"): "the row has a list without brackets, so it has no order",
    ("5,5", "5"): "a list without brackets is a set, so it has no repetition",
    ("5=6", "6"): "of an equation the right side counts, as in 8 \\cdot 9 = 72",
    ("5 cm", "5 km"): "units are ignored",
    ("0.785398", "\\pi/4"): "six right decimals",
    ("3:2", "3/2"): "a ratio is a fraction",
}
CHOICE = [
    ("B is the right choice. Why not C? The answer C ignores friction.", "B"),
    ("B is right. If C is correct, then 1 = 2.", "B"),
    ("The answer is B. If it were heavier, the answer would be C.", "B"), ("B. Otherwise it would be C.", "B"),
    ("The answer is B. I first thought the answer was C.", "B"),
    ("The answer is B. One might think that the correct answer is C.", "B"), ("B. It might also be C.", "B"),
    ("The answer is B. The answer is C if both ends count.", "B"),
    ("The answer is B. Many students think the answer is C.", "B"), ("The answer is B. My first answer was C.", "B"),
    ("Suppose the answer is C. Then 1 = 2. Hence option B.", "B"), ("(B). It would have been (C).", "B"),
    ("The answer is B. Had it been heavier, the answer would be C.", "B"),
    ("B is correct. I thought C is correct.", "B"), ("I would go with option B. It could be option C.", "B"),
    ("The answer is C. No, the answer would be B.", "B"), ("The answer is C. No, the answer should be B.", "B"),
    ("It would be B.", "B"), ("The answer might be B.", "B"),
    ("I considered option C. The answer is B if g is 10.", "B"), ("The answer would be B, if (A) were false.", "B"),
    ("<answer>The answer would be B</answer>", "B"), ("The right choice is B. The answer C ignores friction.", "B"),
    ("\\boxed{answer B}", "B"), ("B is right. Option C is wrong.", "B"), ("\\boxed{AB}", ""),
    ("\\boxed{A\\text{ or }B}", ""), ("\\boxed{A \\\\ B}", ""), ("\\boxed{A B C D}", ""),
    ("<answer>A whale</answer>", ""), ("\\boxed{\\text{(B)}}", "B"), ("A is wrong. <answer>b) the sun</answer>", "B"),
    ("(A) is false, so (B)", "B"), ("A long answer is a pity", ""), ("<answer>both</answer>", ""),
    ("\\boxed{\\mathbf{B}}", "B"), ("\\boxed{$B$}", "B"), ("**B) Paris**\n\nExplanation: (A) is London.", "B"),
    ("\\(B\\)", "B"), ("The answer is B or C.", ""), ("Answer: B and C", ""), ("The answer is B, A is wrong.", "B"),
    ("A. Paris is in France.\nB. London is in England.", ""), ("<think>The answer is A.</think>\n\nB", "B"),
    ("<think>\\boxed{A}</think> so B", "B"), ("The answer is A because it is big", "A"),
    ("<answer>The answer is B</answer>", "B"), ("\\boxed{\\textbf{(B)}\\ 5}", "B"), ("\\boxed{b}", "B"),
    ("The final answer is: $B$", "B"), ("It must be choice (B), since choice C fails.", "B"),
    ("Option A is wrong. Option C is wrong. Option B fits.", "B"), ("A, B, C, D", ""), ("A B C D", ""),
    ("(A) (B) (C) (D)", ""), ("Option B is not correct", ""), ("B, because the others are wrong.", "B"),
    ("### Answer\n\n**B. Paris**", "B"), ("I am torn between A and B.", ""), ("Maybe A or B", ""),
    ("It could be A, B or C.", ""), ("<answer>(A) or (B)</answer>", ""), ("Neither A nor B is correct.", ""),
    ("(A) or (B)", ""), ("Vitamin A, B", ""), ("A is wrong. <answer>b) the sun</answer>", "B"),
    ("(A) is false, so (B)", "B"), ("\\boxed{\\mathbf{B}}", "B"), ("\\boxed{$B$}", "B"),
]  # fmt: skip
GSM8K = [  # the completion, the answer, what it scores with "strict" and with "flexible"
    ("#### $18.00", "18", 1, 1), ("#### \\boxed{18}", "18", 1, 1), ("#### $\\boxed{18}$", "18", 1, 1),
    ("#### £18", "18", 1, 1), ("#### €1,000", "1000", 1, 1), ("#### `18`", "18", 1, 1),
    ("#### 3 apples of 5", "3", 1, 0), ("#### .5", "0.5", 1, 1), ("#### 1,00,000", "100000", 1, 1),
    ("#### 3 or 4", "3", 0, 0), ("#### 3 and 4", "3", 0, 0), ("#### 1e3", "1", 0, 0), ("#### 2*5", "2", 0, 0),
    ("#### 1.2.3", "1.2", 0, 0), ("####", "18", 0, 0), ("is $1,000.50.", "1000.5", 0, 1),
    ("18" + "." * 400, "18", 0, 0), ("eighteen", "18", 0, 0),
    ("#### $1,000.00", "... #### 1,000", 1, 1), ("0.5 or .5", "0.50", 0, 1),
]  # fmt: skip
VERL = [  # of math_dapo: what follows "Answer:"
    ("Answer: 34", 1), ("Answer: $34$", 1), ("Answer: \\boxed{34}", 1), ("Answer: x = 34", 1), ("Answer: 34.", 1),
    ("**Answer:** 34", 1), ("**Answer: 34**", 1), ("**Answer**: $34$", 0), ("answer : 34", 1), ("Answer: \\(34\\)", 1),
    ("Answer: 34 apples", 1), ("Answer: 35\nAnswer: 34", 1), ("Answer: 34\nAnswer: 35", 0), ("Answer: 34 or 35", 0),
    ("34", 0), ("Answer:", 0), ("Answer: ", 0), ("Answer: 3 4", 0), ("\\boxed{34}", 0), ("Answer: $\\frac{68}{2}$", 1),
    ("Answer: 34} or {35", 0), ("Answer: 34}", 0), ("Answer: {34}", 1), ("Answer: \\boxed{34", 0),
    ("Answer: `34`", 1), ("Answer: `$34$`", 1), ("**Answer: `34`**", 1), ("Answer: `35`", 0),
]  # fmt: skip
FORMAT = [  # think, think_answer, think_boxed
    ("<think>a</think>b", 1, 0, 0), ("<think></think>", 1, 0, 0), ("<think>a</think><answer>b</answer>", 1, 1, 0),
    ("<think>a</think>\n\n<answer>b</answer>", 1, 1, 0), ("<think>a</think> x <answer>b</answer>", 1, 0, 0),
    ("<think>a</think><answer>b</answer>.", 1, 0, 0), (" <think>a</think><answer>b</answer>", 0, 0, 0),
    ("<think>a</think>\\boxed{b}", 1, 0, 1), ("<think>\\boxed{b}</think>", 1, 0, 0),
    ("<think>a</think>\\boxed{b", 1, 0, 0),
    ("<think>a<think>b</think>\\boxed{c}", 0, 0, 1), ("a</think>b", 0, 0, 0), ("<think>a", 0, 0, 0),
    ("</think><think>", 0, 0, 0),
    ("<answer>b</answer>", 0, 0, 0), ("<think>a</think><answer>b</answer><answer>c</answer>", 1, 1, 0), ("", 0, 0, 0),
    ("<think></think><answer>", 1, 0, 0), ("<think></answer>", 0, 0, 0), ("<think></think><answer></answer>", 1, 1, 0),
    ("<think>a</think>}\\boxed{", 1, 0, 0), ("<think>a</think>\\boxed{}</think>", 1, 0, 1),
]  # fmt: skip
PROGRAM = "def f():\n    return 1"
CODE = [  # the completion, and whether it has a program
    (f"```python\n{PROGRAM}\n```", 1), (f"```py\n{PROGRAM}\n```", 1), (f"```python3\n{PROGRAM}\n```", 1),
    (f"Text.\n```python\n{PROGRAM}\n```\nMore text.", 1), (f"```python \t\n{PROGRAM}\n```", 1),
    (f"```\n{PROGRAM}\n```", 0), (f"```python\n{PROGRAM}", 0), (PROGRAM, 0), (f"```java\n{PROGRAM}\n```", 0),
    (f"<think>```python\n{PROGRAM}\n```</think>", 0), (f"<think>x</think>```python\n{PROGRAM}\n```", 1), ("", 0),
]  # fmt: skip


def test_every_form_of_a_mathematical_answer_scores_what_it_must():
    rows = MATH + [(*row, 0) for row in LIMITS] + [(*row, 1) for row in LENIENT]
    scores = math.accuracy([f"So it is $\\boxed{{{box}}}$." for box, *_ in rows], [answer for _, answer, _ in rows])
    assert not [(*row, score) for row, score in zip(rows, scores, strict=True) if row[2] != score]


def test_every_form_of_a_choice_is_read():
    texts, letters = map(list, zip(*CHOICE, strict=True))
    expected, chats = [float(bool(letter)) for letter in letters], [[{"content": text}] for text in texts]
    scores = choice.accuracy(texts, [letter or "B" for letter in letters])
    assert not [row for row, score, wanted in zip(CHOICE, scores, expected, strict=True) if score != wanted]
    # An answer may also be the index of a choice.
    assert choice.accuracy(chats, [ord(letter or "B") - ord("A") for letter in letters]) == expected
    assert choice.is_given(texts) == expected


def test_every_form_of_a_number_is_read():
    texts, answers, *scores = map(list, zip(*GSM8K, strict=True))
    for method, expected in zip(("strict", "flexible"), scores, strict=True):
        found = gsm8k.accuracy(texts, answers, method=method)
        assert not [row for row, wanted, score in zip(GSM8K, expected, found, strict=True) if wanted != score]
    assert gsm8k.accuracy([[{"content": "#### -3"}]], [-3]) == [1]
    assert gsm8k.has_mark(["#### 72", "it is 72.", "####72"]) == [1, 0, 1]


def test_every_form_of_an_answer_for_verl_is_read():
    texts = [text for text, _ in VERL]
    found = verl.accuracy(texts, ["34"] * len(texts), ["math_dapo"] * len(texts))
    assert not [(row, score) for row, score in zip(VERL, found, strict=True) if row[1] != score]


def test_every_form_of_a_completion_is_recognised():
    texts = [text for text, *_ in FORMAT]
    found = zip(forms.think(texts), forms.think_answer(texts), forms.think_boxed(texts), strict=True)
    assert not [(row, scores) for row, scores in zip(FORMAT, found, strict=True) if row[1:] != scores]
    texts, given = zip(*CODE, strict=True)
    assert code.is_given(list(texts)) == list(given)
