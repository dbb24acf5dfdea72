//! llama.cpp's notation for grammars, read into rules. Its references to tokens by number are not supported.

use crate::{GRAMMAR_BYTES_MAX, GrammarError};
use std::collections::BTreeMap;

/// How deep parentheses may be nested.
const NESTING_MAX: usize = 64;
/// The most repetitions that may be counted, as in llama.cpp.
const REPETITIONS_MAX: u32 = 2_000;

/// What a rule derives.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Expression {
    /// One after the other.
    Sequence(Vec<Expression>),
    /// Any one of them.
    Choice(Vec<Expression>),
    /// A character within some ranges, or within none.
    Character { ranges: Vec<(u32, u32)>, negated: bool },
    /// Another rule.
    Rule(usize),
    /// Again and again.
    Repeat { what: Box<Expression>, least: u32, most: Option<u32> },
}

/// A grammar.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) bodies: Vec<Expression>,
    pub(crate) root: usize,
}

/// Reads a grammar.
pub(crate) fn parse(text: &str) -> Result<Rules, GrammarError> {
    if text.len() > GRAMMAR_BYTES_MAX {
        return Err(GrammarError(format!("the grammar is longer than {GRAMMAR_BYTES_MAX} bytes")));
    }
    let letters: Vec<char> = text.chars().collect();
    let mut parser = Parser { letters: &letters, at: 0, names: BTreeMap::new(), bodies: Vec::new() };
    parser.space(true);
    while !parser.is_at_end() {
        parser.rule()?;
    }
    let root = *parser.names.get("root").ok_or_else(|| GrammarError("the grammar has no rule named root".into()))?;
    let names: BTreeMap<usize, &String> = parser.names.iter().map(|(name, index)| (*index, name)).collect();
    let mut bodies = Vec::with_capacity(parser.bodies.len());
    for (index, body) in parser.bodies.iter().enumerate() {
        let undefined = || GrammarError(format!("the rule {} is used and not defined", names[&index]));
        bodies.push(body.clone().ok_or_else(undefined)?);
    }
    Ok(Rules { bodies, root })
}

struct Parser<'a> {
    letters: &'a [char],
    at: usize,
    names: BTreeMap<String, usize>,
    bodies: Vec<Option<Expression>>,
}

impl Parser<'_> {
    fn peek(&self) -> Option<char> {
        self.letters.get(self.at).copied()
    }

    fn is_at_end(&self) -> bool {
        self.at >= self.letters.len()
    }

    fn next(&mut self) -> Result<char, GrammarError> {
        let letter = self.peek().ok_or_else(|| self.wrong("the grammar ends too early"))?;
        self.at += 1;
        Ok(letter)
    }

    fn takes(&mut self, expected: &str) -> bool {
        let found = self.letters[self.at..].iter().copied().zip(expected.chars());
        let whole = found.clone().count() == expected.chars().count();
        let here = whole && found.into_iter().all(|(one, other)| one == other);
        if here {
            self.at += expected.chars().count();
        }
        here
    }

    fn wrong(&self, words: &str) -> GrammarError {
        let line = self.letters[..self.at.min(self.letters.len())].iter().filter(|letter| **letter == '\n').count() + 1;
        GrammarError(format!("{words} (line {line} of the grammar)"))
    }

    /// Spaces and comments; lines only where they do not end a rule.
    fn space(&mut self, lines: bool) {
        while let Some(letter) = self.peek() {
            match letter {
                ' ' | '\t' => self.at += 1,
                '\n' | '\r' if lines => self.at += 1,
                '#' => {
                    while self.peek().is_some_and(|letter| letter != '\n' && letter != '\r') {
                        self.at += 1;
                    }
                }
                _ => break,
            }
        }
    }

    fn name(&mut self) -> Result<usize, GrammarError> {
        let begin = self.at;
        while self.peek().is_some_and(|letter| letter.is_ascii_alphanumeric() || letter == '-' || letter == '_') {
            self.at += 1;
        }
        if begin == self.at {
            return Err(self.wrong("the name of a rule is expected"));
        }
        let name: String = self.letters[begin..self.at].iter().collect();
        let next = self.bodies.len();
        let index = *self.names.entry(name).or_insert(next);
        if index == next {
            self.bodies.push(None);
        }
        Ok(index)
    }

    fn rule(&mut self) -> Result<(), GrammarError> {
        let index = self.name()?;
        self.space(false);
        if !self.takes("::=") {
            return Err(self.wrong("::= is expected"));
        }
        self.space(true);
        let body = self.choice(0)?;
        // As in llama.cpp the last definition of a name counts.
        self.bodies[index] = Some(body);
        match self.peek() {
            None => {}
            Some('\n' | '\r') => self.at += 1,
            Some(_) => return Err(self.wrong("a new line is expected")),
        }
        self.space(true);
        Ok(())
    }

    fn choice(&mut self, depth: usize) -> Result<Expression, GrammarError> {
        if depth > NESTING_MAX {
            return Err(self.wrong("parentheses are nested too deep"));
        }
        let mut branches = vec![self.sequence(depth)?];
        while self.peek() == Some('|') {
            self.at += 1;
            self.space(true);
            branches.push(self.sequence(depth)?);
        }
        Ok(Expression::Choice(branches))
    }

    fn sequence(&mut self, depth: usize) -> Result<Expression, GrammarError> {
        let mut parts = Vec::new();
        loop {
            let part = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    Expression::Character { ranges: Vec::new(), negated: true }
                }
                Some('(') => {
                    self.at += 1;
                    self.space(true);
                    let inner = self.choice(depth + 1)?;
                    if self.next()? != ')' {
                        return Err(self.wrong("a parenthesis is not closed"));
                    }
                    inner
                }
                Some('<' | '!') => return Err(self.wrong("tokens cannot be named in a grammar here")),
                Some(letter) if letter.is_ascii_alphanumeric() || letter == '-' || letter == '_' => {
                    Expression::Rule(self.name()?)
                }
                _ => return Ok(Expression::Sequence(parts)),
            };
            self.space(depth > 0);
            let part = self.repeated(part, depth)?;
            parts.push(part);
        }
    }

    fn repeated(&mut self, mut part: Expression, depth: usize) -> Result<Expression, GrammarError> {
        let mut wraps = 0;
        loop {
            let (least, most) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    self.at += 1;
                    let counts = self.counts()?;
                    part = Expression::Repeat { what: Box::new(part), least: counts.0, most: counts.1 };
                    wraps += 1;
                    if wraps > NESTING_MAX {
                        return Err(self.wrong("too many repetitions of one thing"));
                    }
                    self.space(depth > 0);
                    continue;
                }
                _ => return Ok(part),
            };
            self.at += 1;
            wraps += 1;
            if wraps > NESTING_MAX {
                return Err(self.wrong("too many repetitions of one thing"));
            }
            part = Expression::Repeat { what: Box::new(part), least, most };
            self.space(depth > 0);
        }
    }

    fn counts(&mut self) -> Result<(u32, Option<u32>), GrammarError> {
        self.space(false);
        let least = self.count()?;
        self.space(false);
        let most = if self.peek() == Some(',') {
            self.at += 1;
            self.space(false);
            let bounded = self.peek().is_some_and(|letter| letter.is_ascii_digit());
            if bounded { Some(self.count()?) } else { None }
        } else {
            Some(least)
        };
        self.space(false);
        if self.next()? != '}' {
            return Err(self.wrong("} is expected"));
        }
        if most.is_some_and(|most| most < least) {
            return Err(self.wrong("a repetition's greatest number is less than its least"));
        }
        Ok((least, most))
    }

    fn count(&mut self) -> Result<u32, GrammarError> {
        let begin = self.at;
        while self.peek().is_some_and(|letter| letter.is_ascii_digit()) {
            self.at += 1;
        }
        let digits: String = self.letters[begin..self.at].iter().collect();
        match digits.parse::<u32>() {
            Ok(count) if count <= REPETITIONS_MAX => Ok(count),
            _ => Err(self.wrong(&format!("a number from 0 to {REPETITIONS_MAX} is expected"))),
        }
    }

    fn literal(&mut self) -> Result<Expression, GrammarError> {
        self.at += 1;
        let mut parts = Vec::new();
        while self.peek() != Some('"') {
            let letter = self.character()?;
            parts.push(Expression::Character { ranges: vec![(letter, letter)], negated: false });
        }
        self.at += 1;
        Ok(Expression::Sequence(parts))
    }

    fn class(&mut self) -> Result<Expression, GrammarError> {
        self.at += 1;
        let negated = self.peek() == Some('^');
        self.at += usize::from(negated);
        let mut ranges = Vec::new();
        while self.peek() != Some(']') {
            let from = self.character()?;
            let is_range = self.peek() == Some('-') && self.letters.get(self.at + 1).is_some_and(|next| *next != ']');
            let to = if is_range {
                self.at += 1;
                self.character()?
            } else {
                from
            };
            if to < from {
                return Err(self.wrong("a range of characters ends before it begins"));
            }
            ranges.push((from, to));
        }
        self.at += 1;
        if ranges.is_empty() && !negated {
            return Err(self.wrong("there is no character to choose from"));
        }
        Ok(Expression::Character { ranges, negated })
    }

    fn character(&mut self) -> Result<u32, GrammarError> {
        let letter = self.next()?;
        if letter != '\\' {
            return Ok(u32::from(letter));
        }
        match self.next()? {
            'x' => self.hexadecimal(2),
            'u' => self.hexadecimal(4),
            'U' => self.hexadecimal(8),
            't' => Ok(9),
            'r' => Ok(13),
            'n' => Ok(10),
            same @ ('\\' | '"' | '[' | ']' | '-' | '^') => Ok(u32::from(same)),
            _ => Err(self.wrong("this is no escape that is known")),
        }
    }

    fn hexadecimal(&mut self, digits: usize) -> Result<u32, GrammarError> {
        let mut value: u32 = 0;
        for _ in 0..digits {
            let digit = self.next()?.to_digit(16).ok_or_else(|| self.wrong("hexadecimal digits are expected"))?;
            value = (value << 4) | digit;
        }
        if value > u32::from(char::MAX) { Err(self.wrong("there is no such character")) } else { Ok(value) }
    }
}
