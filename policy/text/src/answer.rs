//! Finds reasoning and tool calls in the text of an answer. Pure; the sampled ids are not touched.
//!
//! A call is given out when it is complete. What looks like a call but is malformed stays text, so
//! nothing is lost except the white space around calls and separated reasoning. The parts do not
//! depend on how the text was cut into pieces.
//!
//! `tool-parser` and `reasoning-parser`, which routers use, are not used here: they bring an async
//! runtime and a Python parser, and drop malformed calls.

mod calls;

pub use calls::{Format, Tools};

/// Attempts to read a malformed call in one answer; after so many all is text. Bounds the work.
const MALFORMED_MAX: usize = 64;

/// Begins reasoning.
pub const THINK: &str = "<think>";
const THINK_END: &str = "</think>";

/// A tool that the model calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub name: String,
    /// A JSON object, as the model wrote it where it wrote JSON.
    pub arguments: String,
}

/// Successive parts of an answer. Several texts in a row belong together, as do several pieces of
/// reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    Reasoning(String),
    Text(String),
    Call(Call),
}

/// What to look for.
#[derive(Debug, Clone, Default)]
pub struct Layout {
    /// How calls are written, and the tools that may be called. `None`: calls are text.
    pub calls: Option<(Format, Tools)>,
    /// Whether reasoning is a part of its own. Otherwise it stays in the text with its marks. No
    /// call is looked for in it either way.
    pub separate_reasoning: bool,
    /// The prompt ends with `<think>`, so the answer begins inside the reasoning.
    pub begins_with_reasoning: bool,
}

impl Layout {
    /// Whether the whole answer is one text in any case.
    pub fn is_plain(&self) -> bool {
        self.calls.is_none() && !self.separate_reasoning
    }

    /// Special tokens that must appear in the text for calls to be found.
    pub fn marks(&self) -> &'static [&'static str] {
        self.calls.as_ref().map_or(&[], |(format, _)| format.special_marks())
    }

    /// The parts of a whole answer. Neighbors of a kind are joined.
    pub fn parse(&self, answer: &str) -> Vec<Part> {
        let mut parser = Parser::new(self.clone());
        let mut parts = parser.push(answer);
        parts.extend(parser.finish());
        joined(parts)
    }
}

/// Joins neighboring texts, and neighboring pieces of reasoning.
fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut whole: Vec<Part> = Vec::new();
    for part in parts {
        match (whole.last_mut(), part) {
            (Some(Part::Text(before)), Part::Text(text)) | (Some(Part::Reasoning(before)), Part::Reasoning(text)) => {
                before.push_str(&text);
            }
            (_, part) => whole.push(part),
        }
    }
    whole
}

/// Reads an answer piece by piece.
#[derive(Debug)]
pub struct Parser {
    layout: Layout,
    place: Place,
    /// Text whose part is not decided.
    held: String,
    /// Ends of the held call that were looked at: bytes of `held` that need not be searched again.
    searched: usize,
    malformed: usize,
    text: Spaced,
    reasoning: Spaced,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Nothing but white space was read, or read since the reasoning.
    Beginning,
    Reasoning,
    Text,
    /// `held` begins with the mark of a call, which has this many bytes.
    Call(usize),
}

impl Parser {
    pub fn new(layout: Layout) -> Self {
        let place = match layout.begins_with_reasoning {
            true => Place::Reasoning,
            false => Place::Beginning,
        };
        Parser {
            layout,
            place,
            held: String::new(),
            searched: 0,
            malformed: 0,
            text: Spaced::default(),
            // of the line break after `<think>`
            reasoning: Spaced {
                drop_leading: true,
                ..Spaced::default()
            },
        }
    }

    /// The parts that the next piece decides.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        if self.layout.is_plain() {
            let text = (!piece.is_empty()).then(|| Part::Text(piece.to_owned()));
            return text.into_iter().collect();
        }
        self.held.push_str(piece);
        self.advance(false)
    }

    /// The rest, when the answer has ended.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = self.advance(true);
        if let Some(rest) = self.text.rest() {
            parts.push(Part::Text(rest));
        }
        parts
    }

    fn advance(&mut self, ended: bool) -> Vec<Part> {
        let mut parts = Vec::new();
        while self.step(ended, &mut parts) {}
        parts
    }

    /// Decides about the beginning of what is held. False: more text is needed, or none is held.
    fn step(&mut self, ended: bool, parts: &mut Vec<Part>) -> bool {
        match self.place {
            Place::Beginning => self.begin(ended, parts),
            Place::Reasoning => self.reason(ended, parts),
            Place::Text => self.find_call(ended, parts),
            Place::Call(mark) => self.read_call(mark, ended, parts),
        }
    }

    fn begin(&mut self, ended: bool, parts: &mut Vec<Part>) -> bool {
        let answer = self.held.trim_start();
        if !ended && THINK.starts_with(answer) && answer.len() < THINK.len() {
            return false;
        }
        let blank = self.held.len() - answer.len();
        match answer.starts_with(THINK) {
            true => {
                self.place = Place::Reasoning;
                let mark = self.take(blank + THINK.len());
                if !self.layout.separate_reasoning {
                    self.emit_text(&mark, parts);
                }
            }
            false => {
                self.place = Place::Text;
                // a call may be nothing but JSON, if it is all that the answer has
                if let Some((format, _)) = &self.layout.calls
                    && format.may_be_bare(answer)
                {
                    self.place = Place::Call(0);
                }
            }
        }
        true
    }

    fn reason(&mut self, ended: bool, parts: &mut Vec<Part>) -> bool {
        let end = self.held.find(THINK_END);
        let undecided = match ended {
            true => 0,
            false => suffix_that_begins(&self.held, &[THINK_END]),
        };
        let certain = end.unwrap_or(self.held.len() - undecided);
        let reasoning = self.take(certain);
        match self.layout.separate_reasoning {
            true => parts.extend(self.reasoning.add(&reasoning).map(Part::Reasoning)),
            false => self.emit_text(&reasoning, parts),
        }
        if end.is_none() {
            return false;
        }
        let mark = self.take(THINK_END.len());
        match self.layout.separate_reasoning {
            true => self.text.drop_leading = true,
            false => self.emit_text(&mark, parts),
        }
        self.place = Place::Beginning;
        true
    }

    fn find_call(&mut self, ended: bool, parts: &mut Vec<Part>) -> bool {
        let marks = match &self.layout.calls {
            Some((format, _)) if self.malformed < MALFORMED_MAX => format.marks(),
            _ => &[],
        };
        let found = marks
            .iter()
            .filter_map(|mark| self.held.find(mark).map(|at| (at, mark.len())))
            .min();
        let certain = match found {
            Some((at, _)) => at,
            None if ended => self.held.len(),
            None => self.held.len() - suffix_that_begins(&self.held, marks),
        };
        let text = self.take(certain);
        self.emit_text(&text, parts);
        match found {
            Some((_, mark)) => {
                self.place = Place::Call(mark);
                self.searched = mark;
                true
            }
            None => false,
        }
    }

    fn read_call(&mut self, mark: usize, ended: bool, parts: &mut Vec<Part>) -> bool {
        let Some((format, tools)) = &self.layout.calls else {
            self.place = Place::Text;
            return true;
        };
        let block = loop {
            let (close, whole) = match format.end(&self.held, self.searched) {
                Some(close) => (close, false),
                None if ended => (self.held.len()..self.held.len(), true),
                None => {
                    // an end may be cut in two
                    let tail = format.longest_end().min(self.held.len());
                    self.searched = self.searched.max(floor_boundary(&self.held, self.held.len() - tail));
                    return false;
                }
            };
            match format.calls(&self.held[mark..close.start], tools) {
                calls::Read::Calls(calls) => break Some((calls, close.end)),
                // the end was inside an argument
                calls::Read::Incomplete if !whole && self.malformed < MALFORMED_MAX => {
                    self.malformed += 1;
                    self.searched = close.end;
                }
                calls::Read::Incomplete | calls::Read::Malformed => break None,
            }
        };
        match block {
            Some((calls, end)) => {
                self.take(end);
                self.text.drop_around_call();
                parts.extend(calls.into_iter().map(Part::Call));
            }
            None => {
                self.malformed += 1;
                let mark = self.take(mark);
                self.emit_text(&mark, parts);
            }
        }
        self.searched = 0;
        self.place = Place::Text;
        true
    }

    fn emit_text(&mut self, text: &str, parts: &mut Vec<Part>) {
        parts.extend(self.text.add(text).map(Part::Text));
    }

    fn take(&mut self, bytes: usize) -> String {
        let rest = self.held.split_off(bytes);
        std::mem::replace(&mut self.held, rest)
    }
}

/// Holds white space back until it is known what follows: next to a call it is dropped, so that a
/// template which writes the call again makes the same prompt.
#[derive(Debug, Default)]
struct Spaced {
    held: String,
    drop_leading: bool,
}

impl Spaced {
    fn add(&mut self, text: &str) -> Option<String> {
        let text = match self.drop_leading {
            true => text.trim_start(),
            false => text,
        };
        if text.is_empty() {
            return None;
        }
        self.drop_leading = false;
        self.held.push_str(text);
        let rest = self.held.split_off(self.held.trim_end().len());
        let certain = std::mem::replace(&mut self.held, rest);
        (!certain.is_empty()).then_some(certain)
    }

    fn drop_around_call(&mut self) {
        self.held.clear();
        self.drop_leading = true;
    }

    fn rest(&mut self) -> Option<String> {
        let rest = std::mem::take(&mut self.held);
        (!rest.is_empty()).then_some(rest)
    }
}

/// Bytes at the end of `text` that may begin one of `marks`.
fn suffix_that_begins(text: &str, marks: &[&str]) -> usize {
    let longest = marks.iter().map(|mark| mark.len()).max().unwrap_or(0);
    let from = text.len().saturating_sub(longest.saturating_sub(1));
    let starts = text.char_indices().map(|(at, _)| at).skip_while(|&at| at < from);
    starts
        .map(|at| &text[at..])
        .find(|suffix| marks.iter().any(|mark| mark.starts_with(suffix)))
        .map_or(0, str::len)
}

fn floor_boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests;
