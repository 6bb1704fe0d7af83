//! The rule `comments`.

use super::scan::{Edit, Kind, Line, Scan, edited};

/// `// Reads it.` → `/* Reads it. */`, and so with `///` and `//!`. Several lines are one comment:
/// each line but the first begins with an asterisk.
pub fn comments(text: &str) -> String {
    let scan = Scan::new(text);
    let lines = scan.lines().map(|line| line_comment(&scan, line)).collect::<Vec<_>>();
    let mut edits = Vec::new();
    let mut rest = lines.as_slice();
    while let Some((first, others)) = rest.split_first() {
        let Some(first) = first else {
            rest = others;
            continue;
        };
        let goes_on = |next: &&Option<LineComment<'_>>| next.is_some_and(|next| first.is_continued_by(&next));
        let length = 1 + others.iter().take_while(goes_on).count();
        edits.extend(as_a_block(&rest[..length]));
        rest = &rest[length..];
    }
    edited(text, edits)
}

/// A line comment.
#[derive(Debug, Clone, Copy)]
struct LineComment<'a> {
    /// `//`, `///` or `//!`.
    marker: &'static str,
    /// What follows the marker, without blanks at the end.
    words: &'a str,
    start: usize,
    /// Byte of its line at which it starts.
    column: usize,
    /// Whether no code is on its line.
    is_alone: bool,
}

impl LineComment<'_> {
    fn is_continued_by(&self, next: &Self) -> bool {
        (self.is_alone && next.is_alone) && (self.marker, self.column) == (next.marker, next.column)
    }
}

/// `None`: the line has no such comment.
fn line_comment<'a>(scan: &Scan<'a>, line: Line<'a>) -> Option<LineComment<'a>> {
    let mut places = line.start..line.start + line.text.len();
    let start = places.find(|at| scan.kind(*at) == Some(Kind::Comment))?;
    let comment = line.text[start - line.start..].trim_end();
    let is_inside = start == line.start && scan.continues(line);
    let marker = ["///", "//!", "//"]
        .into_iter()
        .find(|marker| comment.starts_with(marker))?;
    (!is_inside).then(|| LineComment {
        marker,
        words: &comment[marker.len()..],
        start,
        column: start - line.start,
        is_alone: scan.code_of(line).is_empty(),
    })
}

/// The edits that make one block comment of these lines. None if it could not hold what they say.
fn as_a_block(lines: &[Option<LineComment<'_>>]) -> Vec<Edit> {
    let comments = lines.iter().flatten().collect::<Vec<_>>();
    let is_plain = |comment: &&LineComment<'_>| !["*/", "/*"].iter().any(|mark| comment.words.contains(mark));
    let (Some(first), Some(last)) = (comments.first(), comments.last()) else {
        return Vec::new();
    };
    let speaks = |comment: &LineComment<'_>| comment.words.starts_with(' ');
    if !comments.iter().all(is_plain) || !speaks(first) || !speaks(last) {
        return Vec::new();
    }
    let mut edits = Vec::new();
    for (nth, comment) in comments.iter().enumerate() {
        let words = comment.start + comment.marker.len();
        let begins = match (nth, comment.marker) {
            (0, "///") => "/**",
            (0, "//!") => "/*!",
            (0, _) => "/*",
            _ => " *",
        };
        edits.push((comment.start..words, begins.to_owned()));
        if nth + 1 == comments.len() {
            let end = words + comment.words.len();
            edits.push((end..end, " */".to_owned()));
        }
    }
    edits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_comments_become_block_comments() {
        for (text, want) in [
            (
                "// Reads it.\nf(); // And more.  \n",
                "/* Reads it. */\nf(); /* And more. */  \n",
            ),
            (
                "    /// One.\n    ///\n    /// Two.\n",
                "    /** One.\n     *\n     * Two. */\n",
            ),
            (
                "//! A.\n// B.\n// C.\n/// `d`.",
                "/*! A. */\n/* B.\n * C. */\n/** `d`. */",
            ),
            ("// a\n\n// b\n", "/* a */\n\n/* b */\n"),
            ("f(); // a\ng(); // b\n", "f(); /* a */\ng(); /* b */\n"),
        ] {
            assert_eq!(comments(text), want);
            assert_eq!(comments(want), want);
        }
    }

    #[test]
    fn other_comments_stay() {
        for text in [
            "//\n",
            "////////\n",
            "// a\n//\n",
            "// has */ in it\n",
            "// has /* in it\n",
            "let s = \"// a\";\n",
            "let s = \"\n// a\n\";\n",
            "/*\n// a\n*/\n",
            "#[a = \"// b\"]\n",
        ] {
            assert_eq!(comments(text), text);
        }
    }
}
