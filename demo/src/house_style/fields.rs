//! The rule `fields`.

use super::scan::{Brackets, Scan, edited, is_variable, is_word_byte};

/// A word before a struct's name that says that its braces hold no expression's fields.
const NO_EXPRESSION: &[&str] = &[
    "struct", "enum", "union", "trait", "impl", "mod", "fn", "where", "use", "if", "while", "match", "for", "dyn",
];

/// `Foo { a, b }` → `Foo { a: a, b: b }` in expressions, on one line or several; patterns stay.
pub fn fields(text: &str) -> String {
    let scan = Scan::new(text);
    let brackets = scan.brackets();
    let finder = Finder { scan, brackets };
    let mut edits = Vec::new();
    for open in finder.scan.find("{") {
        if let Some(close) = finder.brackets.partner[open]
            && finder.begins_a_struct(open)
            && !finder.is_in_a_pattern(open)
        {
            for (end, name) in finder.shorthands(open, close).unwrap_or_default() {
                edits.push((end..end, format!(": {name}")));
            }
        }
    }
    edits.sort_by_key(|(range, _)| range.start);
    edited(text, edits)
}

struct Finder<'a> {
    scan: Scan<'a>,
    brackets: Brackets,
}

impl<'a> Finder<'a> {
    /// Whether the brace follows a capitalized name, in a place where an expression can be.
    fn begins_a_struct(&self, open: usize) -> bool {
        let text = &self.scan.text[..open];
        let Some(text) = text.strip_suffix(' ') else {
            return false;
        };
        let path = text
            .bytes()
            .rev()
            .take_while(|byte| is_word_byte(*byte) || *byte == b':')
            .count();
        let (head, path) = text.split_at(text.len() - path);
        let name = path.rsplit(':').next().unwrap_or_default();
        let line = head.rfind('\n').map_or(0, |at| at + 1);
        // What precedes the name in the same expression or statement.
        let from = head[line..].rfind(['{', '}', ';']).map_or(line, |at| line + at + 1);
        let from = head[from..].rfind("=>").map_or(from, |at| from + at + 2);
        let head = &head[from..];
        let mut words = head.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        name.starts_with(char::is_uppercase)
            && self.scan.is_all_code(text.len() - path.len()..open)
            && !head.contains("->")
            && !words.any(|word| NO_EXPRESSION.contains(&word))
            && !opens_parameters(head.trim_end())
    }

    /// Whether what follows the bracket's partner, or that of a bracket around it, shows a pattern.
    fn is_in_a_pattern(&self, open: usize) -> bool {
        let bytes = self.scan.text.as_bytes();
        let mut open = open;
        loop {
            let Some(close) = self.brackets.partner[open] else {
                return true;
            };
            let after = self.scan.text[close + 1..].trim_start();
            let marks = ["=", "|", ":", "if ", "in ", "@"];
            if marks.iter().any(|mark| after.starts_with(mark)) && !after.starts_with("||") {
                return true;
            }
            match self.brackets.around[open] {
                Some(at) if bytes[at] == b'{' && !self.begins_a_struct(at) => return false,
                Some(at) if self.scan.text[..at].ends_with("matches!") => return true,
                Some(at) => open = at,
                None => return false,
            }
        }
    }

    /// Ends and names of the fields without a value. `None`: these braces do not hold fields.
    fn shorthands(&self, open: usize, close: usize) -> Option<Vec<(usize, &'a str)>> {
        let text = self.scan.text;
        let bytes = text.as_bytes();
        let mut found = Vec::new();
        let mut start = open + 1;
        let mut at = start;
        while at <= close {
            match bytes[at] {
                b'(' | b'[' | b'{' if self.scan.is_code(at) => at = self.brackets.partner[at]?,
                b',' | b'}' if self.scan.is_code(at) => {
                    let (from, field) = self.field(start, at);
                    if is_variable(field) {
                        found.push((from + field.len(), field));
                    } else if !is_value(field) {
                        return None;
                    }
                    start = at + 1;
                }
                _ => {}
            }
            at += 1;
        }
        Some(found)
    }

    /// A field without the comments and attributes before it, and where it starts.
    fn field(&self, start: usize, end: usize) -> (usize, &'a str) {
        let is_field = |at: &usize| self.scan.is_code(*at) && !self.scan.text.as_bytes()[*at].is_ascii_whitespace();
        let from = (start..end).find(is_field).unwrap_or(end);
        (from, self.scan.text[from..end].trim_end())
    }
}

/// `name: value`, `..value` or nothing.
fn is_value(field: &str) -> bool {
    let name = field.split_once(": ").map_or(field, |(name, _)| name);
    let named = name.len() < field.len() && name.bytes().all(is_word_byte);
    named || field.is_empty() || field.len() > 2 && field.starts_with("..")
}

/// Whether this ends with the first bar of a closure's parameters.
fn opens_parameters(head: &str) -> bool {
    let Some(before) = head.strip_suffix('|') else {
        return false;
    };
    let before = before.trim_end();
    before.is_empty() || before.ends_with(['(', ',', '=']) || before.ends_with("move")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_given_its_value_by_name() {
        for (text, want) in [
            ("let x = Foo { a, b };", "let x = Foo { a: a, b: b };"),
            ("Ok(Self { a, b: c, ..d })", "Ok(Self { a: a, b: c, ..d })"),
            ("x => a::Foo { b },", "x => a::Foo { b: b },"),
            ("if x { Foo { a } }", "if x { Foo { a: a } }"),
            ("f(|x| Foo { x })", "f(|x| Foo { x: x })"),
            ("f(|| Foo { x })", "f(|| Foo { x: x })"),
            (
                "Foo {\n    // b\n    a,\n    #[c]\n    d, // e\n    g: Bar { h },\n}\n",
                "Foo {\n    // b\n    a: a,\n    #[c]\n    d: d, // e\n    g: Bar { h: h },\n}\n",
            ),
        ] {
            assert_eq!(fields(text), want);
            assert_eq!(fields(want), want);
        }
    }

    #[test]
    fn patterns_and_items_stay() {
        for text in [
            "let Foo { a, b } = c;",
            "let Some(Foo { a }) = b else {",
            "if let Foo { a } = b {",
            "Foo { a, b } => c,",
            "Foo { a } if a => c,",
            "(Foo { a }, Bar { b }) => c,",
            "(\n    Foo { a },\n    b,\n) => c,",
            "Foo {\n    a,\n    b: Bar { c },\n} => d,",
            "Foo { a } | Bar { a } => a,",
            "| Foo { a }\n| Bar { a } => a,",
            "for Foo { a } in b {",
            "fn f(Foo { a }: Foo) {",
            "f(|Foo { a }| a)",
            "f(|Foo { a }, b| a)",
            "matches!(a, Foo { b })",
            "Foo { a, .. } => a",
            "let Foo { a, .. }: Foo;",
            "enum Foo { a, b }",
            "struct Foo { a: u8 }",
            "fn f() -> Foo { a }",
            "fn f() -> Self {\n    a\n}",
            "if x == MAX { a }",
            "impl Foo { a }",
            "foo { a }",
            "Foo { a; b }",
            "Foo { A }",
            "Foo { f(), a }",
            "use a::{B, c};",
            "// Foo { a }\n",
            "\"Foo { a }\"",
            "#[x(Foo { a })]",
            "Foo { a",
            "} Foo { a }",
        ] {
            assert_eq!(fields(text), text);
        }
    }
}
