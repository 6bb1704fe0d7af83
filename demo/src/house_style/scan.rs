//! Says which bytes of a Rust file are code, and which belong to literals, comments or attributes.
//! It reads tokens, not grammar, so it accepts any text.

use std::ops::Range;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Everything else, blanks included.
    Code,
    /// `'a`, also as a label.
    Lifetime,
    /// A string literal with its prefix and quotes, raw or not.
    Text,
    /// `'x'` or `b'x'`.
    Char,
    /// A line comment without its newline, or a whole block comment.
    Comment,
    /// `#[…]` or `#![…]`, with what is inside.
    Attribute,
}

/// A file and the kind of each of its bytes.
#[derive(Debug)]
pub struct Scan<'a> {
    pub text: &'a str,
    kinds: Vec<Kind>,
    /// The string literals outside attributes.
    pub strings: Vec<Range<usize>>,
}

/// One line, without its newline.
#[derive(Debug, Clone, Copy)]
pub struct Line<'a> {
    pub start: usize,
    pub text: &'a str,
}

/// For each byte of a text, if it is a bracket of the code:
#[derive(Debug)]
pub struct Brackets {
    /// The bracket that closes or opens it.
    pub partner: Vec<Option<usize>>,
    /// If it opens: the innermost one that is open there.
    pub around: Vec<Option<usize>>,
}

/// New text for a range of the old one.
pub type Edit = (Range<usize>, String);

impl<'a> Scan<'a> {
    pub fn new(text: &'a str) -> Self {
        let mut kinds = Vec::with_capacity(text.len());
        let mut strings = Vec::new();
        while kinds.len() < text.len() {
            let at = kinds.len();
            let (kind, end) = attribute(text, at).map_or_else(|| token(text, at), |end| (Kind::Attribute, end));
            if kind == Kind::Text {
                strings.push(at..end);
            }
            kinds.resize(end, kind);
        }
        Self { text, kinds, strings }
    }

    /// The kind of the byte at `at`; `None` outside the text.
    pub fn kind(&self, at: usize) -> Option<Kind> {
        self.kinds.get(at).copied()
    }

    pub fn is_code(&self, at: usize) -> bool {
        self.kind(at) == Some(Kind::Code)
    }

    pub fn is_all_code(&self, range: Range<usize>) -> bool {
        self.kinds[range].iter().all(|kind| *kind == Kind::Code)
    }

    /// Whether a literal, a block comment or an attribute goes on from the line before.
    pub fn continues(&self, line: Line<'_>) -> bool {
        line.start > 0 && !self.is_code(line.start - 1)
    }

    pub fn lines(&self) -> impl Iterator<Item = Line<'a>> + use<'a> {
        let mut next = 0;
        self.text.split_inclusive('\n').map(move |line| {
            let start = next;
            next += line.len();
            let text = line.strip_suffix('\n').unwrap_or(line);
            Line { start, text }
        })
    }

    /// The code of a line: without the end of a literal from the line before, up to the first
    /// comment, and without blanks on either side.
    pub fn code_of(&self, line: Line<'a>) -> &'a str {
        let end = line.start + line.text.len();
        let mut start = line.start;
        if self.continues(line) {
            let other = (start..end).find(|at| self.kind(*at) != self.kind(line.start - 1));
            start = other.unwrap_or(end);
        }
        let comment = (start..end).find(|at| self.kind(*at) == Some(Kind::Comment));
        self.text[start..comment.unwrap_or(end)].trim()
    }

    /// Words of the code: identifiers, keywords and numbers.
    pub fn words(&self) -> impl Iterator<Item = Range<usize>> {
        let is_word = |at: &usize| self.is_code(*at) && is_word_byte(self.text.as_bytes()[*at]);
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = (at..self.text.len()).find(is_word)?;
            at = (start..self.text.len())
                .find(|at| !is_word(at))
                .unwrap_or(self.text.len());
            Some(start..at)
        })
    }

    /// Where `pattern` begins in the code.
    pub fn find(&self, pattern: &str) -> impl Iterator<Item = usize> {
        let found = self.text.match_indices(pattern).map(|(at, _)| at);
        found.filter(move |at| self.is_all_code(*at..*at + pattern.len()))
    }

    /// How the brackets of the code belong together. From where they are not balanced on, none has
    /// a partner.
    pub fn brackets(&self) -> Brackets {
        let none = vec![None; self.text.len()];
        let mut found = Brackets {
            partner: none.clone(),
            around: none,
        };
        let mut open = Vec::new();
        for (at, byte) in self.text.bytes().enumerate().filter(|(at, _)| self.is_code(*at)) {
            if matches!(byte, b'(' | b'[' | b'{') {
                found.around[at] = open.last().map(|(around, _)| *around);
                open.push((at, byte));
            } else if matches!(byte, b')' | b']' | b'}') {
                match open.pop() {
                    Some((start, opened)) if closes(opened, byte) => {
                        found.partner[start] = Some(at);
                        found.partner[at] = Some(start);
                    }
                    _ => break,
                }
            }
        }
        found
    }

    /// `use` statements that begin a line, from `pub` or `use` to the semicolon.
    pub fn use_statements(&self) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        for line in self.lines() {
            let code = line.text.trim_start();
            let start = line.start + line.text.len() - code.len();
            if self.is_code(start) && without_visibility(code).starts_with("use ") {
                let mut semicolons = self.text[start..].match_indices(';').map(|(at, _)| start + at);
                found.extend(semicolons.find(|at| self.is_code(*at)).map(|end| start..end + 1));
            }
        }
        found
    }
}

/// A line of code without `pub` or `pub(…)`.
pub fn without_visibility(code: &str) -> &str {
    match code.strip_prefix("pub(").and_then(|rest| rest.split_once(')')) {
        Some((_, rest)) => rest.trim_start(),
        None => code.strip_prefix("pub ").unwrap_or(code),
    }
}

/// Makes the edits, which come in the order of the text. One that overlaps the edit before it is
/// left out.
pub fn edited(text: &str, edits: Vec<Edit>) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    let mut done = 0;
    for (range, new) in edits {
        if range.start >= done {
            out.extend([&text[done..range.start], &new]);
            done = range.end;
        }
    }
    out.push_str(&text[done..]);
    out
}

pub fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

/// Whether this is one word that names a variable, a function or a field.
pub fn is_variable(word: &str) -> bool {
    word.bytes().all(is_word_byte) && word.starts_with(|c: char| c.is_lowercase() || c == '_')
}

fn closes(open: u8, close: u8) -> bool {
    matches!((open, close), (b'(', b')') | (b'[', b']') | (b'{', b'}'))
}

/// The end of the attribute that begins at `at`.
fn attribute(text: &str, at: usize) -> Option<usize> {
    let rest = &text[at..];
    let open = ["#[", "#!["].iter().find(|open| rest.starts_with(**open))?.len();
    let mut end = at + open;
    let mut depth = 1;
    while depth > 0 && end < text.len() {
        let (kind, next) = token(text, end);
        match text.as_bytes()[end] {
            b'[' if kind == Kind::Code => depth += 1,
            b']' if kind == Kind::Code => depth -= 1,
            _ => {}
        }
        end = next;
    }
    (depth == 0).then_some(end)
}

/// Kind and end of the token that begins at `at`, which is inside the text.
fn token(text: &str, at: usize) -> (Kind, usize) {
    let rest = &text[at..];
    let word = rest.bytes().take_while(|byte| is_word_byte(*byte)).count();
    let tail = &rest[word..];
    let literal = match (&rest[..word], tail.bytes().next()) {
        ("r" | "br" | "cr", Some(b'"' | b'#')) => raw(tail).map(|len| (Kind::Text, len)),
        ("" | "b" | "c", Some(b'"')) => Some((Kind::Text, quoted(tail))),
        ("" | "b", Some(b'\'')) => char_or_lifetime(tail),
        _ => None,
    };
    if let Some((kind, len)) = literal {
        return (kind, at + word + len);
    }
    if rest.starts_with("//") {
        return (Kind::Comment, at + rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return (Kind::Comment, at + block_comment(rest));
    }
    let first = rest.chars().next().map_or(1, char::len_utf8);
    (Kind::Code, at + word.max(first))
}

/// Length of a raw string from its `#` or `"`; `None`: `r#name`.
fn raw(tail: &str) -> Option<usize> {
    let hashes = tail.bytes().take_while(|byte| *byte == b'#').count();
    let body = tail[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", &tail[..hashes]);
    let end = body.find(&close).map_or(body.len(), |end| end + close.len());
    Some(hashes + 1 + end)
}

/// Length of a string literal with its quotes. Without a closing quote it ends with the text.
fn quoted(tail: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in tail.bytes().enumerate().skip(1) {
        if byte == b'"' && !escaped {
            return at + 1;
        }
        escaped = byte == b'\\' && !escaped;
    }
    tail.len()
}

/// Kind and length of what begins with this single quote. `None`: neither.
fn char_or_lifetime(tail: &str) -> Option<(Kind, usize)> {
    let mut chars = tail.char_indices().skip(1);
    let (_, first) = chars.next()?;
    if first == '\\' {
        let line = tail.split('\n').next()?;
        let end = line.get(3..).and_then(|rest| rest.find('\''))?;
        return Some((Kind::Char, 3 + end + 1));
    }
    if let Some((at, '\'')) = chars.next()
        && !matches!(first, '\'' | '\n')
    {
        return Some((Kind::Char, at + 1));
    }
    let word = tail.bytes().skip(1).take_while(|byte| is_word_byte(*byte)).count();
    (word > 0).then_some((Kind::Lifetime, 1 + word))
}

/// Length of a block comment, which may contain others. Without an end it ends with the text.
fn block_comment(rest: &str) -> usize {
    let (mut at, mut depth) = (0, 0usize);
    while let Some(mark) = rest.as_bytes().get(at..at + 2) {
        match mark {
            b"/*" => depth += 1,
            b"*/" => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text with every byte replaced by a letter for its kind.
    fn letters(text: &str) -> String {
        let scan = Scan::new(text);
        let letter = |at| match scan.kind(at) {
            Some(Kind::Code) => '.',
            Some(Kind::Lifetime) => 'l',
            Some(Kind::Text) => 's',
            Some(Kind::Char) => 'c',
            Some(Kind::Comment) => '/',
            Some(Kind::Attribute) => 'a',
            None => '?',
        };
        (0..text.len()).map(letter).collect()
    }

    #[test]
    fn every_byte_has_its_kind() {
        for (text, want) in [
            (r#"f("a\"b", x)"#, r#"..ssssss...."#),
            (r##"r#"a"b"# + br"\" + r#fn"##, "ssssssss...sssss......."),
            (r"b'\'' '\u{e4}' 'x' '\\'", "ccccc.cccccccc.ccc.cccc"),
            ("fn f<'a>(x: &'a u8) { 'l: loop", ".....ll......ll.......ll......"),
            ("a // b \"\nc", "..//////.."),
            ("/* a /* b */ c\n*/d", "/////////////////."),
            ("#[a(x = \"]\", [1])] b", "aaaaaaaaaaaaaaaaaa.."),
            ("#![a]\nx", "aaaaa.."),
            ("\"a // b\nc\" d", "ssssssssss.."),
            ("'ä' ä", "cccc..."),
        ] {
            assert_eq!(letters(text), want, "{text}");
        }
    }

    #[test]
    fn an_unfinished_token_ends_with_the_text() {
        for (text, want) in [
            ("\"ab\\", "ssss"),
            ("r##\"a\"#", "sssssss"),
            ("/* /*", "/////"),
            ("#[a", "..."),
            ("'", "."),
            ("'\\", ".."),
            ("'\\x", "..."),
        ] {
            assert_eq!(letters(text), want, "{text}");
        }
    }

    #[test]
    fn words_are_found_in_code_alone() {
        let text = "let a1 = b'x' + c(\"d\", 0usize); // e";
        let scan = Scan::new(text);
        let words = scan.words().map(|range| &text[range]).collect::<Vec<_>>();
        assert_eq!(words, ["let", "a1", "c", "0usize"]);
    }

    #[test]
    fn use_statements_begin_a_line_and_may_span_several() {
        let text = "use a::b;\n// use c;\npub(crate) use d::{\n    e,\n};\nlet x = \"\nuse f;\";\n";
        let scan = Scan::new(text);
        let found = scan.use_statements().into_iter().map(|range| &text[range]);
        assert_eq!(
            found.collect::<Vec<_>>(),
            ["use a::b;", "pub(crate) use d::{\n    e,\n};"]
        );
    }
}
