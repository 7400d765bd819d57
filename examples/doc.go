// Package examples holds programs that show one thing each: smallest (the
// smallest data-parallel loop), fromtape (a program on gorgonia's TapeMachine
// moved to tandem), customop (an operation of one's own) and twohosts (ranks
// started by hand). Its tests build and run all of them.
package examples
