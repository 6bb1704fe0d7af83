//! The rules that only add spaces: `colons`, `ranges` and `parens`.

use super::scan::{Kind, Scan, edited};

/// `x: u32` → `x : u32`, except for labels (`'a: loop`). Rustfmt's `space_before_colon`.
pub fn colons(text: &str) -> String {
    let scan = Scan::new(text);
    let mut edits = Vec::new();
    let mut line_start = 0;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'\n' => line_start = at + 1,
            b':' if scan.is_code(at)
                && text[at + 1..].starts_with(' ')
                && names_something(text[line_start..at].trim_start()) =>
            {
                edits.push((at..at, " ".to_owned()));
            }
            _ => {}
        }
    }
    edited(text, edits)
}

/// Whether a type or a value can follow a colon here.
fn names_something(before: &str) -> bool {
    let word = before
        .rsplit(|c: char| !(c.is_alphanumeric() || c == '_' || c == '\''))
        .next();
    let label = word.is_some_and(|word| word.starts_with('\'') && before.len() == word.len());
    !label && before.ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | ')' | ']' | '>' | '}'))
}

/// `0..n` → `0 .. n`, only between two operands. Rustfmt's `spaces_around_ranges`.
pub fn ranges(text: &str) -> String {
    let scan = Scan::new(text);
    let bytes = text.as_bytes();
    let mut edits = Vec::new();
    for at in scan.find("..") {
        let end = at + if bytes.get(at + 2) == Some(&b'=') { 3 } else { 2 };
        let (Some(before), Some(after)) = (bytes[..at].last(), bytes.get(end)) else {
            continue;
        };
        let begins = is_operand(*after) || matches!(after, b'(' | b'[' | b'&' | b'*' | b'-' | b'$');
        let ends = is_operand(*before) || matches!(before, b')' | b']' | b'?');
        if begins && ends && scan.kind(at - 1) != Some(Kind::Comment) && scan.kind(end) != Some(Kind::Comment) {
            edits.push((at..end, format!(" {} ", &text[at..end])));
        }
    }
    edited(text, edits)
}

fn is_operand(byte: u8) -> bool {
    super::scan::is_word_byte(byte) || matches!(byte, b'\'' | b'"')
}

/// `f(x, y)` → `f( x, y )`. The empty pair stays, and so do a bracket at the end or the start of a
/// line and the one of `pub(crate)`.
pub fn parens(text: &str) -> String {
    let scan = Scan::new(text);
    let bytes = text.as_bytes();
    let mut edits = Vec::new();
    // Whether each open bracket is one of a visibility.
    let mut open = Vec::new();
    for (at, byte) in text.bytes().enumerate().filter(|(at, _)| scan.is_code(*at)) {
        let opens = byte == b'(';
        if opens {
            open.push(text[..at].ends_with("pub") && !text[..at].ends_with("_pub"));
        }
        if !matches!(byte, b'(' | b')') || (if opens { open.last().copied() } else { open.pop() }) == Some(true) {
            continue;
        }
        // What stands inside, next to this bracket.
        let (place, inside) = match opens {
            true => (at + 1, bytes.get(at + 1)),
            false => (at, bytes[..at].last()),
        };
        let partner = if opens { b')' } else { b'(' };
        if inside.is_some_and(|inside| *inside != partner && !inside.is_ascii_whitespace()) {
            edits.push((place..place, " ".to_owned()));
        }
    }
    edited(text, edits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What all three rules leave alone.
    const ALONE: &[&str] = &[
        "// f(a: b, 0..n)\n",
        "/// f(a: b, 0..n)\n",
        "/* (a\nb: c)\n0..n */\n",
        "let s = \"f(a: b, 0..n)\";\n",
        "let s = r#\"\n\"(a: b)\" 0..n\n\"#;\n",
        "let c = '(';\n",
        "#[arg(value: x, num_args = 0..2)]\n",
        "f();\n",
    ];

    #[test]
    fn a_space_comes_before_a_colon_that_names_something() {
        for (text, want) in [
            ("fn f<T: Copy>(x: T, y: &'a T)\n", "fn f<T : Copy>(x : T, y : &'a T)\n"),
            ("    x: z, // a: b\n", "    x : z, // a: b\n"),
            ("let (a, b): (u8, u8) = c;", "let (a, b) : (u8, u8) = c;"),
            ("where Vec<T>: Copy, 'a: 'b", "where Vec<T> : Copy, 'a : 'b"),
        ] {
            assert_eq!(colons(text), want);
            assert_eq!(colons(want), want);
        }
        for text in ["    'a: loop {\n", "std::mem::take(x)\n", "$x:expr\n", "x ? y : z\n"] {
            assert_eq!(colons(text), text);
        }
        for text in ALONE {
            assert_eq!(colons(text), *text);
        }
    }

    #[test]
    fn ranges_between_two_operands_get_spaces() {
        for (text, want) in [
            ("for i in 0..n {\n", "for i in 0 .. n {\n"),
            ("x[a..b.len()]", "x[a .. b.len()]"),
            ("'a'..='z' => (-1..=1)", "'a' ..= 'z' => (-1 ..= 1)"),
            ("f()..-x, y[0]..(z)", "f() .. -x, y[0] .. (z)"),
        ] {
            assert_eq!(ranges(text), want);
            assert_eq!(ranges(want), want);
        }
        for text in [
            "..Default::default()",
            "x[..]",
            "x[1..]",
            "x[..n]",
            "(a, ..)",
            "Foo { a, .. }",
            "[a, rest @ ..]",
            "f(a, ...)",
            "0.. /* n */ n",
            "a../* n */",
            "0..",
            "..",
            "0..=",
        ] {
            assert_eq!(ranges(text), text);
        }
        for text in ALONE {
            assert_eq!(ranges(text), *text);
        }
    }

    #[test]
    fn round_brackets_get_spaces_inside() {
        for (text, want) in [
            ("f(x, g(y), ())", "f( x, g( y ), () )"),
            ("pub(crate) fn f(self)", "pub(crate) fn f( self )"),
            ("pub(in (a)) struct S(u8);", "pub(in ( a )) struct S( u8 );"),
            ("f(\n    (a, b),\n    c)\n", "f(\n    ( a, b ),\n    c )\n"),
            ("f('(', \")\", \")\")", "f( '(', \")\", \")\" )"),
            ("f(/* a */ b)", "f( /* a */ b )"),
            ("f(\n    x, // )\n)", "f(\n    x, // )\n)"),
        ] {
            assert_eq!(parens(text), want);
            assert_eq!(parens(want), want);
        }
        for text in ["f(", ")", ")(", "(\n", "pub("] {
            assert_eq!(parens(&parens(text)), parens(text));
        }
        for text in ALONE {
            assert_eq!(parens(text), *text);
        }
    }
}
