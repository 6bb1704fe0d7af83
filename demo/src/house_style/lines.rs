//! The rules for whole lines: `returns` and `derives`.

use super::scan::{Kind, Line, Scan, edited, is_word_byte, without_visibility};

/// A tail with one of these at its start stays a tail.
const NOT_RETURNED: &[&str] = &[
    "if", "match", "for", "while", "loop", "unsafe", "async", "let", "return", "break", "continue", "fn", "const",
    "static", "struct", "enum", "union", "type", "use", "impl", "mod", "trait", "pub", "extern",
];
/// Macros that never have a value, by their own names and by the house's.
const DIVERGING: &[&str] = &[
    "panic",
    "todo",
    "unreachable",
    "unimplemented",
    "fatal",
    "missing",
    "never",
];

/// `Ok(x)` → `return Ok(x);` in the last line of a function that has a result, where rustfmt has
/// put the whole tail expression on that line.
pub fn returns(text: &str) -> String {
    let scan = Scan::new(text);
    let lines = scan.lines().collect::<Vec<_>>();
    let mut edits = Vec::new();
    // Indentations of the functions that are open, and whether they have a result.
    let mut functions: Vec<(usize, bool)> = Vec::new();
    for (nth, line) in lines.iter().enumerate() {
        let code = scan.code_of(*line);
        if code.is_empty() || scan.continues(*line) {
            continue;
        }
        let indent = line.text.len() - line.text.trim_start().len();
        while functions.last().is_some_and(|(function, _)| *function > indent) {
            functions.pop();
        }
        if begins_a_function(code) {
            functions.push((indent, false));
        }
        let Some((_, has_result)) = functions.last_mut().filter(|(function, _)| *function == indent) else {
            continue;
        };
        *has_result |= code.contains("->");
        if code == "}" && *has_result && tail_is_plain(&scan, &lines[..nth], indent + 4) {
            let start = lines[nth - 1].start + indent + 4;
            let end = start + scan.code_of(lines[nth - 1]).len();
            edits.push((start..start, "return ".to_owned()));
            edits.push((end..end, ";".to_owned()));
        }
        if code.ends_with([';', '}']) {
            functions.pop();
        }
    }
    edited(text, edits)
}

fn begins_a_function(code: &str) -> bool {
    let qualifiers = ["default", "const", "async", "unsafe", "extern"];
    let mut words = without_visibility(code).split(' ');
    words.find(|word| !qualifiers.contains(word) && !word.starts_with('"')) == Some("fn")
}

/// Whether the last of these lines is a tail expression with this indentation.
fn tail_is_plain(scan: &Scan<'_>, lines: &[Line<'_>], indent: usize) -> bool {
    let Some((tail, before)) = lines.split_last().filter(|(tail, _)| !scan.continues(**tail)) else {
        return false;
    };
    let code = scan.code_of(*tail);
    let start = tail.start + tail.text.len() - tail.text.trim_start().len();
    let rest = scan.text[start + code.len()..].trim_start_matches([' ', '\t']);
    if start != tail.start + indent || !(rest.starts_with("//") || rest.starts_with('\n')) {
        return false;
    }
    let mut before = before.iter().rev().map(|line| scan.code_of(*line));
    let before = before.find(|code| !code.is_empty()).unwrap_or_default();
    let begins = match code.chars().next() {
        Some('.' | '}' | ')' | ']' | '#' | '$' | '?' | '+' | '/' | '=') | None => false,
        _ => !["&&", "||"]
            .iter()
            .any(|mark| before.ends_with('}') && code.starts_with(mark)),
    };
    let word = code.split(|c: char| !(c.is_alphanumeric() || c == '_')).next();
    // `Self { x }` may end with a brace, a block may not.
    let is_struct = code.starts_with(char::is_uppercase) && code.contains(" { ");
    let ends = !code.ends_with([';', '{', ',', '(', '[', '=', '|']) && (is_struct || !code.ends_with('}'));
    begins
        && ends
        && before.ends_with([';', '{', '}'])
        && !word.is_some_and(|word| NOT_RETURNED.contains(&word) || DIVERGING.contains(&word))
        && is_balanced(scan, start, code)
}

/// Whether every bracket of the code is closed in it, and it is one expression.
fn is_balanced(scan: &Scan<'_>, start: usize, code: &str) -> bool {
    let mut depth = 0;
    for (_, byte) in code.bytes().enumerate().filter(|(at, _)| scan.is_code(start + at)) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' | b';' if depth == 0 => return false,
            b')' | b']' | b'}' => depth -= 1,
            _ => {}
        }
    }
    depth == 0
}

/// `#[derive(Debug, Clone)]` → `#[derive(Clone, Debug)]`, `#[inline]` → `#[inline(always)]`.
pub fn derives(text: &str) -> String {
    let scan = Scan::new(text);
    let mut edits = Vec::new();
    for line in scan.lines() {
        let start = line.start + line.text.len() - line.text.trim_start().len();
        if scan.kind(start) != Some(Kind::Attribute) || line.text[start - line.start..].starts_with("#[doc") {
            continue;
        }
        if line.text.trim() == "#[inline]" {
            edits.push((start..start + "#[inline]".len(), "#[inline(always)]".to_owned()));
        }
        for (at, open) in line.text.match_indices("derive(") {
            let list = &line.text[at + open.len()..];
            let list = &list[..list.find(')').unwrap_or(0)];
            let at = line.start + at + open.len();
            let mut names = list.split(", ").collect::<Vec<_>>();
            let is_name = |name: &&str| !name.is_empty() && name.bytes().all(|byte| is_word_byte(byte) || byte == b':');
            if scan.kind(at) == Some(Kind::Attribute) && names.iter().all(is_name) {
                names.sort_unstable();
                edits.push((at..at + list.len(), names.join(", ")));
            }
        }
    }
    edited(text, edits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_on_one_line_is_returned() {
        for (text, want) in [
            ("fn f() -> u8 {\n    1\n}\n", "fn f() -> u8 {\n    return 1;\n}\n"),
            (
                "    pub async fn f(\n    ) -> u8 {\n        g();\n\n        // h\n        x // i\n    }\n",
                "    pub async fn f(\n    ) -> u8 {\n        g();\n\n        // h\n        return x; // i\n    }\n",
            ),
            (
                "fn f() -> S\nwhere\n    S: T,\n{\n    if x {\n        g()\n    }\n    S { x }\n}\n",
                "fn f() -> S\nwhere\n    S: T,\n{\n    if x {\n        g()\n    }\n    return S { x };\n}\n",
            ),
            (
                "fn f() -> X {\n    fn g() -> X {\n        1\n    }\n    x = \"\n}\n\";\n    x\n}\n",
                "fn f() -> X {\n    fn g() -> X {\n        return 1;\n    }\n    x = \"\n}\n\";\n    return x;\n}\n",
            ),
        ] {
            assert_eq!(returns(text), want);
            assert_eq!(returns(want), want);
        }
    }

    #[test]
    fn other_tails_stay() {
        for body in [
            "g();",
            "match x {}",
            "a\n        .b()",
            "a(\n        b,\n    )",
            "let x = 1;\n    // x",
            "let x = 1;\n    /* x */ x",
            "#[cfg(x)]\n    x",
            "if x {\n    }\n    && y",
            "\"\n    x\"",
            "x;\n    \"\n    x",
            "panic!()",
            "x ||",
            "return x",
            "{ x }",
            "x; y",
        ] {
            let text = format!("fn f() -> u8 {{\n    {body}\n}}\n");
            assert_eq!(returns(&text), text);
        }
        for text in [
            "fn f() {\n    g()\n}\n",
            "fn f() -> u8;\n\nmod x {\n    y\n}\n",
            "let f = || -> u8 {\n    g()\n};\n",
            "/*\nfn f() -> u8 {\n    1\n}\n*/\n",
        ] {
            assert_eq!(returns(text), text);
        }
    }

    #[test]
    fn derive_lists_are_sorted_and_inline_means_always() {
        for (text, want) in [
            ("#[derive(Debug, Clone)]\n", "#[derive(Clone, Debug)]\n"),
            ("#[cfg_attr(x, derive(b::D, A))]", "#[cfg_attr(x, derive(A, b::D))]"),
            ("    #[inline]\n", "    #[inline(always)]\n"),
        ] {
            assert_eq!(derives(text), want);
            assert_eq!(derives(want), want);
        }
        for text in [
            "#[inline(never)]\n",
            "// #[derive(B, A)]\n",
            "/// #[inline]\n",
            "let s = \"\n#[inline]\n\";\n",
            "#[derive(\n    B,\n    A,\n)]\n",
            "#[derive(B, /* c */ A)]\n",
            "#[derive(B, A",
            "derive(B, A)\n",
            "#[x] // derive(B, A)\n",
            "#[doc = \"derive(B, A)\"]\n",
            "#[derive()]\n",
        ] {
            assert_eq!(derives(text), text);
        }
    }
}
