package bpe

import (
	"unicode"
	"unicode/utf8"
)

// class says what the pattern that splits text into words sees in a character.
// Where tables of Unicode could differ in an opinion it is unsure.
type class uint8

const (
	unsure class = iota
	letter
	number
	other // punctuation and symbols
	apostrophe
	space
)

func classOf(r rune) class {
	switch {
	case r == ' ' || r == '\n' || r == '\t' || r == '\r':
		return space
	case r == '\'':
		return apostrophe
	case r == utf8.RuneError:
		return unsure
	case unicode.IsLetter(r):
		return letter
	case unicode.IsNumber(r):
		return number
	case unicode.IsPunct(r) || unicode.IsSymbol(r):
		return other
	}
	return unsure
}

// apart reports whether the pattern never has a and b, which follow one
// another, in one word, and finds the same words before b as at the end of a text.
//
// GPT-2's pattern is 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+.
// A word is of one class, but for a space before it and an apostrophe before
// some letters. The only look ahead is the one after white space, so a text may
// be cut behind anything else.
func apart(a, b class) bool {
	if a == unsure || b == unsure || a == space || a == b {
		return false
	}
	if a == apostrophe {
		return b != letter && b != other
	}
	return a != other || b != apostrophe
}

// Cut returns the largest n > 0 such that the tokens of p[:n] and of p[n:],
// whatever follows p, are those of the whole; 0 if there is no such place in
// p. It may miss places where only rare characters meet.
func (e *Encoding) Cut(p []byte) int {
	at := len(p)
	for at > 0 && !utf8.RuneStart(p[at-1]) {
		at-- // bytes of a character that may go on behind p
	}
	at = max(0, at-1)
	next := unsure
	if r, n := utf8.DecodeRune(p[at:]); at+n == len(p) {
		next = classOf(r)
	}
	for at > 0 {
		r, n := utf8.DecodeLastRune(p[:at])
		c := classOf(r)
		if apart(c, next) {
			return at
		}
		next, at = c, at-n
	}
	return 0
}
